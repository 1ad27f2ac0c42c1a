"""Sizes that Dynamo gives symbols of their own: equal ones are guarded on, and the guard holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, blank, optimise
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from npugraph_ex.graph.memory.aliases import output_values

npu = torch.ops.npu


def _norm_and_quantisation(a: Any, b: Any, g: Any) -> Any:
    y, _, x = npu.npu_add_rms_norm(a, b, g)
    return (*npu.npu_dynamic_quant(y), x)


def _inputs(rows: int, others: int) -> list[torch.Tensor]:
    """x1 and x2, whose first sizes are dynamic, and gamma."""
    made = [torch.ones(size, 64, dtype=torch.float16, device="npu") for size in (rows, others)]
    for tensor in made:
        torch._dynamo.mark_dynamic(tensor, 0)
    return [*made, torch.ones(64, dtype=torch.float16, device="npu")]


def test_equal_sizes_under_two_symbols_are_guarded_on() -> None:
    """x1 and x2 have one size, which the graph does not know: the report shows the guard."""
    gm = aot_graph(_norm_and_quantisation, *_inputs(3, 3), dynamic=None)
    placeholders = gm.graph.find_nodes(op="placeholder")
    symbols = [str(n.meta["val"]) for n in placeholders if isinstance(n.meta["val"], torch.SymInt)]
    assert len(set(symbols)) == 2
    (fusion,) = next(record.fusions for record in optimise(gm).rules if record.fusions)
    assert fusion.guards in [(f"Eq({a}, {b})",) for a, b in permutations(symbols)]


def test_different_sizes_under_two_symbols_are_refused() -> None:
    """The reason names both operands."""
    report = optimise(aot_graph(_norm_and_quantisation, *_inputs(3, 2), dynamic=None))
    assert report.fusions() == 0
    assert "and x2 torch.float16[s" in report.near_misses()[0].reason


@pytest.mark.slow
def test_the_guard_keeps_other_sizes_out_of_the_compiled_code() -> None:
    """Other equal sizes run the same code; unequal ones compile anew, and what is compiled then is not fused."""
    fusions: list[int] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        fusions.append(optimise(gm).fusions())
        return lambda *_: [blank(value) for value in output_values(gm.graph)]

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler, keep_inference_input_mutations=True)

    torch.compiler.reset()
    compiled = torch.compile(_norm_and_quantisation, backend=backend, fullgraph=True)
    with torch.no_grad():
        for rows, others in ((3, 3), (5, 5), (5, 2)):
            compiled(*_inputs(rows, others))
    assert fusions == [1, 0]
