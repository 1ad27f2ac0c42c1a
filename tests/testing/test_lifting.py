"""What is traced by shortcuts is what meta kernels and arithmetic on symbols say, also where a shortcut must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.testing import Input, tracing
from npugraph_ex.testing.lifting import UnliftableError
from npugraph_ex.testing.program import function_of
from npugraph_ex.testing.tracing import trace

MATRIX, VECTOR = Input(("s0", 4)), Input(("s1",))
SYMBOLIC = {
    "no elements": ("{aten}.slice.Tensor(x0, 0, 0, 4)", [Input(("s0", 0))]),
    "a size that is a product": ("{aten}.relu.default(x1)", [Input(("s0",)), Input(("s0*4",))]),
    "a size as a number": ("{aten}.mul.Tensor(x0, {aten}.sym_size.int(x0, 0))", [MATRIX]),
    "parts of a symbol": ("{aten}.split.Tensor(x0, 2)[0]", [MATRIX]),
    "parts of a symbol of two": ("{aten}.unbind.int({aten}.t.default(x0), -1)[0], x1", [MATRIX, VECTOR]),
    "a write through a view": (
        "{aten}.add_.Tensor({aten}.view.default(x0, [-1]), 1), {aten}.relu.default(x0)",
        [MATRIX],
    ),
    "a write that make_fx knows": (
        "{aten}.add_.Tensor({aten}.permute.default(x0, [1, 0]), 1), {aten}.relu.default(x0)",
        [MATRIX],
    ),
}
LIFTED = {
    "a product": ("{aten}.view.default({aten}.relu.default(x0), [-1])", [MATRIX]),
    "parts of a number": ("{aten}.split.Tensor(x0, 2, 1)[0]", [MATRIX]),
    "two symbols": ("{aten}.add.Tensor({aten}.view.default(x0, [-1, 1]), x1)", [MATRIX, VECTOR]),
}
PLAIN = {
    "several results": "{aten}.frexp.Tensor({aten}.abs.default(x0))",
    "the argument itself": "[{aten}.positive.default(x0) for _ in range(2)]",
    "another memory format": "[{aten}.clone.default(x0, memory_format=torch.channels_last) for _ in range(2)]",
}


def _program(returned: str, inputs: list[Input]) -> Callable[..., Any]:
    names = ", ".join(f"x{position}" for position in range(len(inputs)))
    return function_of(f"def program({names}):\n    return {returned.format(aten='torch.ops.aten')}\n")


def _shown(gm: fx.GraphModule) -> list[object]:
    """Every node with its arguments, what its tensors are and which of them share memory."""
    storages: dict[int, int] = {}
    return [
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), _tensors(node, storages))
        for node in gm.graph.nodes
    ]


def _tensors(node: fx.Node, storages: dict[int, int]) -> list[object]:
    leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    numbers = [storages.setdefault(_torch_private.storage_key(leaf), len(storages)) for leaf in leaves]
    return [
        (str(leaf.shape), str(leaf.stride()), str(leaf.storage_offset()), leaf.dtype, leaf.device, number)
        for leaf, number in zip(leaves, numbers, strict=True)
    ]


def _traced(returned: str, inputs: list[Input], *, dynamic: bool) -> list[object]:
    tracing._grounds.clear()
    sizes = {"s0": 6, "s1": 5} if dynamic else {}
    return _shown(trace(_program(returned, inputs), inputs, sizes, dynamic=dynamic, functional=True))


@pytest.mark.filterwarnings("ignore:Raw SymInt value")
@pytest.mark.parametrize("case", [*SYMBOLIC, *LIFTED])
def test_a_graph_with_primes_is_lifted_to_what_symbols_would_give_or_not_at_all(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, arguments and tensors are those of a trace with symbols; no prime is left, and lists stay short."""
    lifted = list[object]()
    original = tracing._lifted

    def counting(*args: Any, **kwargs: Any) -> fx.GraphModule:
        graph = original(*args, **kwargs)
        lifted.append(graph)
        return graph

    monkeypatch.setattr(tracing, "_lifted", counting)
    found = _traced(*{**SYMBOLIC, **LIFTED}[case], dynamic=True)
    monkeypatch.setattr(tracing, "_lifted", _refuse)
    assert found == _traced(*{**SYMBOLIC, **LIFTED}[case], dynamic=True)
    assert bool(lifted) == (case in LIFTED)


def _refuse(*args: object, **kwargs: object) -> None:
    raise UnliftableError


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_not_one_new_dense_tensor_is_left_to_the_meta_kernel(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides, results and shared memory of elementwise operators that return something else are as the kernel says."""
    inputs = [Input((2, 3, 4, 5), "float32")]
    found = _traced(PLAIN[case], inputs, dynamic=False)
    monkeypatch.setattr(tracing, "run_pointwise", lambda *call: call[-1]())
    assert found == _traced(PLAIN[case], inputs, dynamic=False)


def test_a_remembered_dtype_follows_the_default_dtype() -> None:
    """An integer tensor divided by a number is of the default dtype of the moment."""
    inputs, returned = [Input((2,), "int32")], "{aten}.div.Tensor(x0, 2)"
    narrow = _traced(returned, inputs, dynamic=False)
    torch.set_default_dtype(torch.float64)
    try:
        wide = _traced(returned, inputs, dynamic=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert "torch.float32" in str(narrow[1])
    assert "torch.float64" in str(wide[1])
