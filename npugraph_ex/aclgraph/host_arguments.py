"""A registry, by operator name, of host arguments that may change between replays.

A captured kernel keeps the host arguments of its launch. For registered operators a replay gives the kernel new host
arguments (see `host_updates`), so that new lengths in an attention step need no new capture.
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
"""The operators that users register. Other operators have a record, see ``_recorded``."""


def register_host_arguments(operator: str, names: Sequence[str], *, workspace: str = "") -> None:
    """Register host arguments that replays update, so that the capture does not fix their values.

    The operator must write into memory that it is given, or have an ``.out`` overload that does: an update launches the
    operator again for the same memory. It must start the same number of kernels for all values. A second, equal registration
    does nothing. Graphs compiled earlier do not change.

    Args:
        operator: its name with namespace, as in ``"my_library::my_attention"``.
        names: the names of the arguments, which are whole numbers, lists of them, or tensors on the CPU.
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
    """The registration of an operator, or None."""
    if not isinstance(overload, OpOverload):
        return None
    name = _torch_private.schema(overload).name
    return _registered.get(name) or _recorded(name)


def _recorded(name: str) -> HostArguments | None:
    """The host arguments in the operator's record."""
    record = OPERATORS.get(name)
    if record is None or not record.host_arguments:
        return None
    return HostArguments(name, record.host_arguments, record.workspace)


def relaunched(overload: OpOverload, entry: HostArguments) -> OpOverload:
    """The overload that writes only into its arguments' memory: the operator itself, or its ``.out`` form.

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
            "memory; add one, or let the operator write into an argument"
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
