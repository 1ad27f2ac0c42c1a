"""The strides of a view, also of dimensions of one element, are those of the device, where torch's fake mode has others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.graph import metadata

WHOLE = (torch.empty(2, 1, 4), torch.empty(1, 2, 1, 3), torch.empty(2, 4, 1, 3), torch.empty(2, 1, 3, 2)[..., 0])


def _sizes(elements: int, rank: int) -> Iterator[tuple[int, ...]]:
    """All shapes of this rank with so many elements."""
    if rank == 1:
        yield (elements,)
        return
    for first in range(1, elements + 1):
        if elements % first == 0:
            yield from ((first, *others) for others in _sizes(elements // first, rank - 1))


def _views(x: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    for sizes in (sizes for rank in range(1, 4) for sizes in _sizes(x.numel(), rank)):
        try:
            yield sizes, x.view(sizes)
        except RuntimeError:
            continue  # no view has these sizes


@pytest.mark.slow
def test_what_is_not_doubtful_is_right() -> None:
    """Of all views of small tensors: strides that fake tensors and real ones have otherwise are doubtful, and derived right."""
    mode, graph = FakeTensorMode(), fx.Graph()
    for x in (whole.permute(order) for whole in WHOLE for order in permutations(range(whole.dim()))):
        source = graph.placeholder("x")
        source.meta["val"] = mode.from_tensor(x)
        for sizes, view in _views(x):
            node = graph.call_function(torch.ops.aten.view.default, (source, list(sizes)))
            with mode:
                node.meta["val"] = source.meta["val"].view(sizes)
            if metadata.has_doubtful_strides(node):
                node.meta["val"] = metadata.derive(node, mode)
            assert node.meta["val"].stride() == view.stride(), (x.stride(), sizes)


@pytest.mark.slow
def test_what_expand_adds_has_no_stride() -> None:
    """As on the device, so that a pass may change what comes before it; torch traces a stride of 1."""
    torch.compiler.reset()
    for sizes in ((1,), (1, 1), (3,), (3, 1), (1, 3)):
        compiled = torch.compile(
            lambda x, sizes=sizes: (x + 1).sum().expand(sizes),
            backend="npugraph_ex",
            options={"post_grad_custom_post_pass": _negated_twice},
        )
        x = torch.arange(4.0, device="npu")
        with torch.no_grad():
            result, expected = compiled(x), (x + 1).sum().expand(sizes)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride() == (0,) * len(sizes)


def _merged(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).transpose(1, 2).reshape(2, 1, 64)


def _negated_twice(gm: fx.GraphModule, *_: Any) -> None:
    graph = gm.graph
    (add,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    with graph.inserting_after(add):
        first = graph.call_function(torch.ops.aten.neg.default, (add,))
    with graph.inserting_after(first):
        second = graph.call_function(torch.ops.aten.neg.default, (first,))
    add.replace_all_uses_with(second, delete_user_cb=lambda user: user is not first)


def test_a_pass_may_change_what_comes_before_such_a_view() -> None:
    """Torch traces a stride of 16 for the result's second dimension, and eager mode gives 64: a pass that keeps it is right."""
    torch.compiler.reset()
    x = torch.arange(128.0, device="npu").view(2, 4, 1, 16)
    compiled = torch.compile(_merged, backend="npugraph_ex", options={"post_grad_custom_post_pass": _negated_twice})
    with torch.no_grad():
        result, expected = compiled(x), _merged(x)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride() == (64, 64, 1)
