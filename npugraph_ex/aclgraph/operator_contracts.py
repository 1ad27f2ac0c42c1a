"""Checks that operators of other libraries keep their contract: their fake function, and the aliases and writes of their schema.

The passes rely on these contracts. A broken one gives wrong values that no other check can see. So each such operator is
compared with its contract where a graph runs for the first time: at every capture, and at the first uncaptured run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.scopes import GraphFunction
from npugraph_ex.errors import BrokenPromiseError
from npugraph_ex.graph.memory.aliases import named_arguments
from npugraph_ex.graph.source import source_line

_SHIPPED = frozenset(
    {"aten", "prims", "prim", "npu", "atb", "npugraph_ex", "air", "_c10d_functional", "c10d_functional"}
)
"""Operators of torch, of torch_npu and of this library are not checked: their users cannot mend them.

What the schemas of torch.distributed's collectives leave out, `graph.collectives` knows.
"""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""What has memory to look at; fake tensors and other subclasses have not."""


def is_foreign(target: object) -> bool:
    """Whether ``target`` is an operator that a user or another library registered."""
    return isinstance(target, OpOverload) and target.namespace not in _SHIPPED


class ContractInterpreter(fx.Interpreter):
    """Runs a graph node by node, and checks its foreign operators.

    Raises:
        BrokenPromiseError: an operator does not keep its contract.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # messages name the node themselves
        self._at: fx.Node | None = None

    @property
    def location(self) -> str:
        """The operator that ran last and where the user wrote it, for a message."""
        if self._at is None:
            return "the graph"
        source = source_line(self._at)
        return f"{self._at.name} ({self._at.target})" + (f" at {source}" if source else "")

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and know which one it is."""
        self._at = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; a foreign one is checked."""
        given = _tensors((args, kwargs)) if is_foreign(target) else []
        if not given or any(type(tensor) not in _PLAIN for tensor in given):
            return super().call_function(target, args, kwargs)
        unwritten = _left_alone(target, args, kwargs)
        versions = [tensor._version for tensor in unwritten]  # noqa: SLF001 - torch has no public name for it
        # Under a dispatch mode, such as AOT's around the first call, torch does not count the writes of a kernel.
        with _torch_private.unobserved_execution():
            result = super().call_function(target, args, kwargs)
        if versions != [tensor._version for tensor in unwritten]:  # noqa: SLF001
            self._refuse(
                "wrote to an argument that its schema does not declare as written", "declare it in mutates_args"
            )
        if _is_alias(target, given, _tensors(result)):
            self._refuse("returned memory of an argument or of another result, undeclared", "return a clone")
        broken = _difference(_declared(target, args, kwargs), result)
        if broken:
            self._refuse(broken, "mend the function given to register_fake")
        return result

    def _refuse(self, what: str, remedy: str) -> None:
        raise BrokenPromiseError(
            f"{self.location} {what}. The graph was rewritten on the strength of its word; {remedy}"
        )


def first_run_checked(gm: fx.GraphModule) -> GraphFunction:
    """The graph's forward; where the graph has foreign operators, a run that checks them in place of the first call."""
    if not any(is_foreign(node.target) for node in gm.graph.nodes):
        return gm.forward
    checked = False

    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal checked
        if checked:
            results: Sequence[Any] = gm.forward(*inputs)
        else:
            results = ContractInterpreter(gm).run(*inputs, enable_io_processing=False)
            checked = True
        return results

    return run


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _left_alone(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the schema does not declare as written, and whose writes torch counts."""
    written = {
        a.name for a in _torch_private.schema(target).arguments if a.alias_info is not None and a.alias_info.is_write
    }
    given = named_arguments(target, args, kwargs)
    theirs = {_torch_private.storage_key(tensor) for name in written for tensor in _tensors(given.get(name))}
    return [t for t in _tensors(given) if not t.is_inference() and _torch_private.storage_key(t) not in theirs]


def _declared(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the fake function says of these arguments; None where it needs their elements to tell."""
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        try:
            return target(*fakes[0], **fakes[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None


def _difference(declared: object, result: object) -> str:
    """How the tensors of a result differ from the declared ones; empty if they do not."""
    for fake, real in zip(_tensors(declared), _tensors(result), strict=False):
        for name, old, new in _facts(fake, real):
            if old != new:
                return f"returned a tensor {name} {new}, and its fake function says {old}"
    return ""


def _facts(fake: torch.Tensor, real: torch.Tensor) -> Iterator[tuple[str, object, object]]:
    yield "of shape", list(fake.shape), list(real.shape)
    yield "of", fake.dtype, real.dtype
    yield "on", fake.device, real.device
    if real.numel():
        strides = [list(_moving(tensor)) for tensor in (fake, real)]
        yield "with strides", strides[0], strides[1]


def _moving(tensor: torch.Tensor) -> Iterator[int]:
    """The strides that say where elements are."""
    return (stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size != 1)


def _is_alias(target: OpOverload, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether a result that is declared to be new memory lies in an argument's, or in another result's."""
    if any(returned.alias_info is not None for returned in _torch_private.schema(target).returns):
        return False
    storages = [*map(_torch_private.storage_key, results), *{_torch_private.storage_key(tensor) for tensor in given}]
    return len(set(storages)) < len(storages)
