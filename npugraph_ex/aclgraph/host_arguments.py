"""Which operators take arguments from the host that may change between replays, and which arguments: a registry by name.

A captured kernel keeps the host arguments that it was launched with. For the operators named here a replay gives it new
ones instead (see `host_updates`), so that the lengths of an attention step make no new graph.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.errors import HostArgumentError
from npugraph_ex.operators import OPERATORS


@dataclass(frozen=True)
class HostArguments:
    """One registered operator.

    Attributes:
        operator: its name, such as ``"npu::npu_fused_infer_attention_score"``.
        names: its arguments that may change between replays: whole numbers, lists of them, or tensors on the CPU.
        workspace: the operator that allocates memory large enough for every value of them, called with the same
            arguments; its result is passed as ``workspace``. Empty where the operator needs none.
    """

    operator: str
    names: tuple[str, ...]
    workspace: str = ""


_lock = threading.Lock()
_registered: dict[str, HostArguments] = {}
"""Those that users register. Of others their records tell, see ``_recorded``."""


def register_host_arguments(operator: str, names: Sequence[str], *, workspace: str = "") -> None:
    """Say that an operator's host arguments may be updated between replays instead of being captured.

    The operator must write into memory that it is given, or have an ``.out`` overload that does: an update launches it
    again, for the same memory. It must start the same number of kernels whatever the values. Saying the same twice does
    nothing; graphs that are compiled already are not concerned.

    Args:
        operator: its name with namespace, as in ``"my_library::my_attention"``.
        names: the arguments: whole numbers, lists of them, or tensors on the CPU.
        workspace: the operator that allocates its workspace, if it takes one.

    Raises:
        HostArgumentError: no such operator or argument, an argument of another kind, an operator that only returns new
            memory, or another registration under the name.
    """
    if isinstance(names, str):
        raise HostArgumentError(f"register_host_arguments({operator!r}): names takes a list of names, got {names!r}")
    entry = HostArguments(operator, tuple(names), workspace)
    relaunched(_overload(operator, "default"), entry)
    with _lock:
        known = _recorded(operator) or _registered.setdefault(operator, entry)
    if known != entry:
        raise HostArgumentError(
            f"{operator} is registered already, with {known.names} and workspace {known.workspace!r}"
        )


def registered(overload: object) -> HostArguments | None:
    """What is registered for an operator; None for any other."""
    if not isinstance(overload, OpOverload):
        return None
    name = _torch_private.schema(overload).name
    return _registered.get(name) or _recorded(name)


def _recorded(name: str) -> HostArguments | None:
    """What the operator's record says of its host arguments."""
    record = OPERATORS.get(name)
    if record is None or not record.host_arguments:
        return None
    return HostArguments(name, record.host_arguments, record.workspace)


def relaunched(overload: OpOverload, entry: HostArguments) -> OpOverload:
    """The overload that writes only into memory that it is given: the operator itself, or its ``.out`` form.

    Raises:
        HostArgumentError: there is none, or the operator does not take the arguments of ``entry``.
    """
    schema = _torch_private.schema(overload)
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    for name in entry.names:
        if name not in kinds:
            raise HostArgumentError(f"{entry.operator} has no argument {name!r}; it takes {', '.join(kinds)}")
        if not any(word in kinds[name] for word in ("int", "SymInt", "Tensor")):
            raise HostArgumentError(
                f"{entry.operator}: {name} is a {kinds[name]}; whole numbers, lists of them and CPU tensors can be updated"
            )
    if all(result.alias_info is not None for result in schema.returns):
        return overload
    out: object = getattr(overload.overloadpacket, "out", None)
    if not isinstance(out, OpOverload):
        raise HostArgumentError(
            f"{entry.operator} returns new memory and has no .out overload, so it cannot be launched again for the same "
            "memory; give it one, or let it write into an argument"
        )
    return out


def _overload(name: str, overload: str) -> OpOverload:
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator else None
    found: object = getattr(packet, overload, None)
    if not isinstance(found, OpOverload):
        raise HostArgumentError(f"there is no operator {name!r}; the name is 'namespace::operator'")
    return found


def workspace_operator(entry: HostArguments) -> OpOverload | None:
    """The operator that allocates the workspace, if there is one."""
    return _overload(entry.workspace, "default") if entry.workspace else None
