"""The kernels that a report counts are those that run, also of operators that the device takes apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import npu_emulator
from npugraph_ex.report.graphs import graph_records, graphs_so_far

_aten = torch.ops.aten
SIZE = 8


def attended(x: torch.Tensor) -> torch.Tensor:
    """Attention with a mask, of which AOT makes a softmax that is safe for rows without a number."""
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=x * 0)


TAKEN_APART: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "_safe_softmax": (lambda x: _aten._safe_softmax(x, -1), 5),
    "_safe_softmax to another dtype": (lambda x: _aten._safe_softmax(x.half(), -1, torch.float32), 6),
    "attention": (attended, 11),
    "isinf": (torch.isinf, 2),
    "masked_fill of what is read later": (lambda x: x.masked_fill(x > 0, 1) + x, 4),
    "select_scatter": (lambda x: torch.select_scatter(x, x[0], 0, 1), 2),
    "block_diag": (lambda x: torch.block_diag(x[0], x[0], x[0]), 4),
    "rot90": (torch.rot90, 1),
    "as many as lists are long": (lambda x: torch.cat(_aten.split_with_sizes_copy(x, [2, 2, 4])), 4),
}
"""Each with its kernels in eager mode."""
WRITING: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "memory alone": (lambda x: torch.empty_like(x).copy_(x), 2),
    "in place": (lambda x: x.masked_fill_(x > 0, 1), 4),
}
"""Each with the kernels of AOT's graph, which writes into copies."""


@pytest.mark.parametrize("form", [*TAKEN_APART, *WRITING])
def test_as_many_kernels_are_counted_as_run(form: str) -> None:
    """In AOT's graph those of eager mode; after the passes, with the copies of inputs, those of a replay."""
    function, kernels = (TAKEN_APART | WRITING)[form]
    example = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).npu()[None, None]
    example = example if form == "attention" else example[0, 0]

    def logged(call: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[str], torch.Tensor]:
        x = example.clone()
        with npu_emulator.kernel_log() as log:
            result = call(x)
            torch.npu.synchronize()
        return [one.name for one in log], result

    torch.compiler.reset()
    compiled = torch.compile(function, backend="npugraph_ex", fullgraph=True)
    mark = graphs_so_far()
    with torch.inference_mode():
        compiled(example.clone())
        (graph,) = graph_records(after=mark)
        replayed, result = logged(compiled)
        eager, expected = logged(function)
    torch.testing.assert_close(result, expected)
    copies = sum(one.kind == "copied" for one in graph.inputs)
    assert graph.kernels_before == kernels
    assert form in WRITING or kernels == len(eager), eager
    assert graph.kernels_after + copies == len(replayed), replayed
