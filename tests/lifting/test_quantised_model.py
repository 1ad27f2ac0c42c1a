"""A decoder layer of quantised weights and activations in plain PyTorch: lifted operators are fused with their neighbours."""

# The calls of the modules are what their names say.
# ruff: noqa: D102

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import npu_emulator
import npugraph_ex

WIDTH, HEADS, INNER = 64, 4, 96


class QuantisedLinear(torch.nn.Module):
    """Weights of int8 with a scale for each column; each token is quantised in the call."""

    def __init__(self, columns: int, rows: int, bound: float) -> None:
        super().__init__()
        weight = torch.randn(rows, columns) / columns**0.5
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bound = bound

    def forward(self, x: Any) -> Any:
        wide = x.reshape(-1, x.shape[-1]).float()
        scale = wide.abs().amax(-1, keepdim=True) / 127
        if self.bound:
            scale = scale.clamp(min=self.bound)
        quantised = (wide / scale).round().clamp(-128, 127).to(torch.int8)
        total = quantised.float() @ self.weight.float().t()
        return (total * scale * self.scale).to(x.dtype).view(*x.shape[:-1], -1)


class Norm(torch.nn.Module):
    """As Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH).half())

    def forward(self, x: Any) -> Any:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(torch.nn.Module):
    """Attention and a gated feed-forward, with gate and up in one weight."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (QuantisedLinear(WIDTH, WIDTH, bound) for _ in range(4))
        self.up, self.down = QuantisedLinear(WIDTH, 2 * INNER, bound), QuantisedLinear(INNER, WIDTH, bound)
        self.before, self.after = Norm(), Norm()

    def forward(self, x: Any) -> Any:
        normed = self.before(x)
        heads = [one(normed).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.after(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def _launched(call: Callable[[], Any]) -> tuple[torch.Tensor, int]:
    """The result of a call, and how many kernels it started."""
    torch.npu.synchronize()
    before = Counter(npu_emulator.kernel_counts())
    result = call()
    torch.npu.synchronize()
    return result, sum((Counter(npu_emulator.kernel_counts()) - before).values())


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.0, 1e-5], ids=["", "bounded"])
def test_quantised_layer(bound: float) -> None:
    """Norm and quantisation are one operator, SwiGLU and quantisation too, and a product with its scales."""
    torch.manual_seed(0)
    layer, x = Layer(bound).npu(), torch.randn(2, 3, WIDTH).half().npu()
    rules = {"swiglu_quant": True}
    ways = {
        "eager": layer,
        "aot_eager": torch.compile(layer, backend="aot_eager"),
        "lifted": torch.compile(
            layer, backend="npugraph_ex", options={"lift": "judged", "force_eager": True, "fusion_rules": rules}
        ),
    }
    kernels, results = {}, {}
    for way, call in ways.items():
        torch.compiler.reset()
        with torch.no_grad():
            call(x)
            results[way], kernels[way] = _launched(lambda call=call: call(x))
    report = npugraph_ex.last_report()
    assert report is not None
    fused = {name: report.fusions(name) for name in ("add_rms_norm_dynamic_quant", "swiglu_quant")}
    assert fused == dict.fromkeys(fused, 0 if bound else 1), report.table()
    assert report.fusions("lift_dynamic_quant") == report.fusions("lift_quant_matmul") == 6, report.table()
    assert tuple(kernels.values()) == ((114, 114, 23) if bound else (108, 108, 14))
    # One step of the quantised numbers may go the other way.
    assert torch.allclose(results["lifted"], results["eager"], rtol=1e-2, atol=2e-2)
