"""The judge decides at the sizes that a model has: of large tensors it takes some rows, and only where rows do not meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.lifting import judging, trials
from npugraph_ex.lifting.fewer_rows import fewer
from npugraph_ex.lifting.judging import _of_kind, _Pair
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.operators import PreparedGraph

Shape = tuple[int, ...]


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def softmax_of_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Queries and columns of values are free, keys and what is multiplied are not."""
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def with_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    """Rows and columns of a product."""
    return torch.addmm(b, x, w)


def turned(x: torch.Tensor) -> Any:
    """Each element is added to its mirror image, so that rows and columns are one axis, and then rows are summed."""
    return (x + x.t()).sum(0)


def reversed_rows(x: torch.Tensor) -> Any:
    """Every row meets another one."""
    return x + x.flip(0)


def shifted(x: torch.Tensor) -> Any:
    """Neighbours meet."""
    return x[1:] * x[:-1]


def joined(x: torch.Tensor, y: torch.Tensor) -> Any:
    """What follows each other is split as it was joined."""
    first, second = torch.split(torch.cat((x, y), 1), [x.shape[1], y.shape[1]], 1)
    return first.exp(), second.exp()


def by_heads(x: torch.Tensor) -> Any:
    """A dimension is taken apart, and one part is summed over."""
    return x.view(x.shape[0], 64, 8).sum(2)


def written(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> Any:
    """Rows of a cache."""
    return cache.index_copy(0, slots, rows)


FREE: dict[Callable[..., Any], tuple[tuple[Shape, ...], tuple[Shape, ...]]] = {
    rms_norm: (((64, 1024), (1024,)), ((24, 1024), (1024,))),
    softmax_of_products: (((2, 96, 256), (2, 160, 256), (2, 160, 192)), ((2, 4, 256), (2, 160, 256), (2, 160, 5))),
    with_bias: (((300, 4096), (4096, 4096), (4096,)), ((6, 4096), (4096, 8), (8,))),
    turned: (((256, 256),), ((256, 256),)),
    reversed_rows: (((256, 256),), ((256, 96),)),
    shifted: (((256, 256),), ((256, 96),)),
    joined: (((64, 6000), (64, 5000)), ((64, 256), (64, 320))),
    by_heads: (((512, 512),), ((48, 512),)),
    written: (((4096, 64), (16,), (16, 64)), ((320, 64), (16,), (16, 64))),
}
"""The sizes of the inputs, and those of a trial."""


def graph_of(function: Callable[..., Any], *shapes: Shape, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """The ATen graph of a function; whole numbers for an input of 16 elements."""
    given = [torch.empty(shape, dtype=torch.int64 if shape == (16,) else dtype) for shape in shapes]
    made = make_fx(lambda *inputs: as_tuple(function(*inputs)), tracing_mode="fake")(*given)
    return made.graph


def as_tuple(results: Any) -> tuple[Any, ...]:
    """One result as several."""
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("function", FREE, ids=lambda function: function.__name__)
def test_rows_that_do_not_meet_are_few(function: Callable[..., Any]) -> None:
    """What is mixed keeps its size; the results of the rows that are left are those that they have among all rows."""
    shapes, few = FREE[function]
    graph = graph_of(function, *shapes)
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    rows = fewer([graph, graph], values, [])
    assert rows.shapes == few
    generator = torch.Generator().manual_seed(3)
    drawn = [
        torch.randperm(16, generator=generator)
        if shape == (16,)
        else torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    parts = [value[tuple(map(slice, shape or ()))] for value, shape in zip(drawn, rows.shapes, strict=True)]
    whole = PreparedGraph(graph).run(*drawn)
    part = PreparedGraph(rows.graphs[0]).run(*parts)
    for all_rows, some in zip(whole, part, strict=True):
        torch.testing.assert_close(some, all_rows[tuple(map(slice, some.shape))])


def test_what_nobody_knows_stays_whole() -> None:
    """An operator without a rule mixes all that it reads."""
    graph = graph_of(lambda x: torch.cdist(x, x), (300, 300))
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    assert fewer([graph, graph], values, []).shapes == ((300, 300),)


def ruling(
    spelled: Callable[..., Any], operator: Callable[..., Any], dtype: torch.dtype = torch.float16
) -> judging.Ruling:
    """The judge's, on ordinary inputs of 8 rows of 64."""
    graphs = [graph_of(one, (8, 64), dtype=dtype) for one in (spelled, operator)]
    inputs = graphs[0].find_nodes(op="placeholder")
    pair = _Pair(graphs[0], graphs[1], Proposal(tuple(inputs), (), ()))
    kind = next(trials.kinds(inputs, trials.Sizes(), few=False))
    return _of_kind(pair, kind, exact=False)


def once(x: torch.Tensor) -> Any:
    """Rounded once but for the last bits of float32."""
    return (x.float() * 1.1 * 1.3).half()


def once_otherwise(x: torch.Tensor) -> Any:
    """The same in another order."""
    return (x.float() * 1.3 * 1.1).half()


def a_little_more(x: torch.Tensor) -> Any:
    """Off by a fiftieth of an ulp of float16: 0.52 ulp at worst."""
    return (x.float() * (1.1 * 1.3 * (1 + 2.0**-16))).half()


def test_more_than_half_an_ulp_is_admitted_only_where_eager_mode_has_it() -> None:
    """What rounds once to 0.504 ulp is refused beside what rounds to 0.5; two that are equally near take each other's place."""
    assert "farther from float64 than eager mode" in ruling(once, a_little_more).reason
    assert ruling(once, once_otherwise).reason == ruling(once_otherwise, once).reason == ""
