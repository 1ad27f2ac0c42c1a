"""Chains of `as_strided`: the upper one alone says where a view lies, whatever it is applied to, in units of one dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fx_helpers import evaluate, targets
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.config.options import Options
from npugraph_ex.passes import pipeline

PASS = tuple(pass_ for pass_ in pipeline.PIPELINE if pass_.name == "canonical_views")


@pytest.mark.parametrize(
    ("program", "left"),
    [
        (lambda x: (x.as_strided((2,), (1,), 1).as_strided((3,), (2,), 0) + 1,), ["as_strided", "add"]),
        (lambda x: ((x * 2).as_strided((2,), (1,), 1).as_strided((8,), (1,), 0) + 1,), ["mul", "add"]),
        # Another call may bring an input that begins elsewhere in its storage.
        (lambda x: (x.as_strided((2,), (1,), 1).as_strided((8,), (1,), 0) + 1,), ["as_strided", "add"]),
        # An offset that is left out is that of the view below.
        (lambda x: (x.as_strided((4,), (1,), 2).as_strided((2,), (2,)) + 1,), ["as_strided", "as_strided", "add"]),
        # Offsets below are in elements of another size.
        (
            lambda x: (x.as_strided((2,), (1,), 1).view(torch.int32).as_strided((2,), (2,), 1) + 1,),
            ["as_strided", "view", "as_strided", "add"],
        ),
    ],
    ids=["chain", "back to the whole", "back to an input", "no offset", "another dtype"],
)
def test_chains_are_shortened(program: Callable[[torch.Tensor], tuple[torch.Tensor]], left: list[str]) -> None:
    """What remains is as short as it may be and reads the same elements."""
    x = torch.arange(8)
    gm = make_fx(program, tracing_mode="fake")(x)
    report = pipeline.run(gm, [x], Options(), passes=PASS)
    assert report.passes[0].outcome in {"changed", "unchanged"}
    gm.graph.eliminate_dead_code()
    assert targets(gm) == left
    assert torch.equal(evaluate(gm, x)[0], program(x)[0])
