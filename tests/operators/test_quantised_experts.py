"""vLLM-Ascend's own operators for experts in int8."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators._precision import UnsupportedArgumentError
from npugraph_ex.operators.grouped_matmul_swiglu_quant_weight_nz import grouped_matmul_swiglu_quant_weight_nz
from npugraph_ex.operators.npu_dequant_swiglu_quant import npu_dequant_swiglu_quant_of_halves


def _wanted(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of halves, and dynamic quantisation."""
    gate, up = wide.chunk(2, -1)
    s = torch.nn.functional.silu(gate) * up
    scale = s.abs().amax(-1) / 127
    return (s / scale[:, None]).round().to(torch.int8), scale


def test_experts_products_are_those_of_their_rows() -> None:
    """The rows up to each end take the next expert's weight and scale; a limit is refused."""
    x, weight = (torch.randint(-8, 8, size, dtype=torch.int8) for size in ((5, 16), (2, 16, 8)))
    weight_scale, x_scale, ends = torch.rand(2, 8), torch.rand(5), torch.tensor([2, 5])
    y, scale, _ = grouped_matmul_swiglu_quant_weight_nz(x, weight, weight_scale, x_scale, ends)
    of_row = torch.tensor([0, 0, 1, 1, 1])
    products = (x.float()[:, None] @ weight.float()[of_row]).squeeze(1)
    wanted, wanted_scale = _wanted(products * weight_scale[of_row] * x_scale[:, None])
    torch.testing.assert_close(scale, wanted_scale)
    assert (y.int() - wanted.int()).abs().max() <= 1
    with pytest.raises(UnsupportedArgumentError, match="swiglu_limit"):
        grouped_matmul_swiglu_quant_weight_nz(x, weight, weight_scale, x_scale, ends, swiglu_limit=7.0)


@pytest.mark.parametrize(("mode", "limit"), [(0, 0.0), (1, 0.0), (1, 0.5)])
def test_halves_are_cut_off_only_with_a_limit(mode: int, limit: float) -> None:
    """In both modes the halves are those of the row, and one scale for each column is the only group's."""
    x, weight_scale, x_scale = torch.randint(-99, 99, (4, 16)).int(), torch.rand(16) / 50, torch.rand(4)
    y, scale = npu_dequant_swiglu_quant_of_halves(
        x, weight_scale=weight_scale, activation_scale=x_scale, group_index=torch.tensor([4]), quant_mode=1,
        swiglu_mode=mode, clamp_limit=limit,
    )  # fmt: skip
    wide = x * weight_scale * x_scale[:, None]
    if limit:
        gate, up = wide.chunk(2, -1)
        wide = torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit)], -1)
        assert not torch.equal(wide, x * weight_scale * x_scale[:, None])
    wanted, wanted_scale = _wanted(wide)
    torch.testing.assert_close(scale, wanted_scale)
    assert (y.int() - wanted.int()).abs().max() <= 1
