"""A mask that is causal but for one diagonal is no causal mask: attention keeps exactly the keys that the program keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, optimise
from torch import fx
from torch.nn import functional

ROWS = 5
DENSE = {0, 1}
"""Values of ``sparse_mode`` that read a mask, or none, as it is given; others mean a causal one of their own."""


def _hidden(q: Any, diagonal: int) -> Any:
    return torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).triu(diagonal + 1)


def _by_a_truth(q: Any, k: Any, v: Any, diagonal: int) -> Any:
    kept = torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).tril(diagonal)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)


def _by_a_bias(q: Any, k: Any, v: Any, diagonal: int) -> Any:
    bias = torch.zeros(ROWS, ROWS, dtype=q.dtype, device=q.device).masked_fill(_hidden(q, diagonal), float("-inf"))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _by_a_sum(q: Any, k: Any, v: Any, diagonal: int) -> Any:
    bias = torch.full((ROWS, ROWS), float("-inf"), dtype=q.dtype, device=q.device).triu(diagonal + 1)
    return torch.ops.aten._safe_softmax((q * 0.25) @ k.mT + bias, -1) @ v


def _by_filling(q: Any, k: Any, v: Any, diagonal: int) -> Any:
    return ((q * 0.25) @ k.mT).masked_fill(_hidden(q, diagonal), float("-inf")).softmax(-1) @ v


LIFTED: dict[Callable[..., Any], bool] = {_by_a_truth: False, _by_a_bias: True, _by_a_sum: True, _by_filling: False}
"""Whether the form lifts it; torch_npu itself has a kernel for a mask of truth values."""


@pytest.mark.parametrize("diagonal", [-1, 0, 1])
@pytest.mark.parametrize("attend", LIFTED, ids=lambda attend: attend.__name__.removeprefix("_by_"))
def test_keys_of_the_mask_are_read_and_no_others(attend: Callable[..., Any], diagonal: int) -> None:
    """Values are those of float64 for this diagonal, which another diagonal does not give; no operator has a mask of its own."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(2, 4, ROWS, 16, generator=generator).half() for _ in range(3)]
    on_device = [value.npu() for value in given]
    gm = aot_graph(lambda *tensors: attend(*tensors, diagonal), *on_device)
    report = optimise(gm, lift="judged")
    assert report.fusions("lift_attention") == LIFTED[attend], report.table()
    assert all(mode in DENSE for mode in _sparse_modes(gm.graph))
    result = gm(*on_device)[0].cpu().double()
    exact, *others = (
        attend(*(value.double() for value in given), other) for other in (diagonal, diagonal - 1, diagonal + 1)
    )
    torch.testing.assert_close(result, exact, rtol=2e-3, atol=2e-3, equal_nan=True)
    for other in others:
        assert (result - other).abs().nan_to_num(1.0).max() > 0.1


def _sparse_modes(graph: fx.Graph) -> list[Any]:
    """That of each call of fused attention."""
    found = []
    for node in graph.nodes:
        if "fusion_attention" in str(node.target):
            names = [argument.name for argument in node.target._schema.arguments]
            found.append((dict(zip(names, node.args, strict=False)) | node.kwargs).get("sparse_mode", 0))
    return found


def test_a_causal_call_has_another_mode() -> None:
    """So that the test above would see one."""
    given = [torch.randn(2, 4, ROWS, 16).half().npu() for _ in range(3)]
    gm = aot_graph(lambda *tensors: functional.scaled_dot_product_attention(*tensors, is_causal=True), *given)
    assert not DENSE.issuperset(_sparse_modes(gm.graph))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, torch.inf), (torch.bfloat16, 3e38)])
def test_a_causal_mask_is_no_proof(dtype: torch.dtype, largest: float) -> None:
    """The first row has a key, whose score is -inf: eager mode gives NaN, the operator 0. In bfloat16 float64 gives numbers.

    So the option, by which a user declares that there is no such row, stays for causal masks, too.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, ROWS, 16, generator=generator).to(dtype) for _ in range(3))
    q[..., 0, 0], k = -largest, k.abs() + 10
    on_device = [value.npu() for value in (q, k, v)]
    gm = aot_graph(lambda *tensors: _by_filling(*tensors, 0), *on_device)
    declared = aot_graph(lambda *tensors: _by_filling(*tensors, 0), *on_device)
    report = optimise(gm, lift="judged")
    assert report.fusions("lift_attention") == 0, report.table()
    assert "every_row_attends=True declares" in report.near_misses("lift_attention")[0].reason
    assert optimise(declared, lift="judged", every_row_attends=True).fusions("lift_attention") == 1
    eager, lifted = gm(*on_device)[0].cpu()[0, 0], declared(*on_device)[0].cpu()[0, 0]
    assert eager[0].isnan().all()
    assert (lifted[0] == 0).all()
    assert torch.allclose(eager[1:], lifted[1:], rtol=2e-2, atol=2e-2)
    truth = _by_filling(q.double(), k.double(), v.double(), 0)[0, 0, 0]
    assert bool(truth.isfinite().all()) == (dtype == torch.bfloat16)
