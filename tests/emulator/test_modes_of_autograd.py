"""Eager code runs the same operators with gradients, without them, and in inference mode, as torch_npu does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

import npu_emulator

MODES: dict[str, Callable[[], object]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def _heads() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, 7, 16, generator=generator, dtype=torch.float16).npu() for _ in range(3)]


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "causal": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "plain": functional.scaled_dot_product_attention,
    "masked": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(7, 7, dtype=torch.bool, device="npu").tril()
    ),
    "grouped": lambda q, k, v: functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "softmax": lambda q, k, v: torch.softmax(q + k, -1, dtype=torch.float32) * v,
    "matmul": lambda q, k, v: (q @ k.mT) @ v,
    "losses": lambda q, k, v: (
        functional.l1_loss(q, k) + functional.kl_div(q, v.float().softmax(-1).half(), reduction="batchmean")
    ),
    "activations": lambda q, k, v: functional.logsigmoid(q) + functional.silu(k) + torch.where(q > 0, k, v),
}

ATTENTION = ("causal", "plain", "masked", "grouped")


@pytest.mark.parametrize("name", CALLS)
def test_every_mode_runs_the_same(name: str) -> None:
    """Kernels, values and the state of the generator are one and the same."""
    seen = {}
    for mode, entered in MODES.items():
        operands = _heads()
        torch.manual_seed(3)
        with entered(), npu_emulator.kernel_log() as log:  # type: ignore[attr-defined]
            result = CALLS[name](*operands)
            torch.npu.synchronize()
        seen[mode] = (result.detach().cpu().tolist(), torch.npu.get_rng_state().tolist())
        if name in ATTENTION:
            assert len(log.of("npu.npu_fusion_attention_v3*")) == 1, mode
    assert seen["no_grad"] == seen["grad"]
    assert seen["inference"] == seen["grad"]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_modes_follow_each_other(captured: bool) -> None:
    """Memory that work in inference mode used is ordinary memory afterwards, and the other way round."""

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 2 + 1).sum(-1)

    expected = work(torch.ones(2, 32, dtype=torch.float16))
    for entered in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with entered():
            x = torch.ones(2, 32, dtype=torch.float16).npu()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph) if captured else nullcontext():
                result = work(x)
            if captured:
                graph.replay()
            torch.npu.synchronize()
            assert torch.equal(result.cpu(), expected), entered


def _of_inference() -> torch.Tensor:
    """A copy into a host tensor that was made in inference mode, which no code outside that mode may write."""
    with torch.inference_mode():
        return torch.empty(4, pin_memory=True).copy_(torch.arange(4.0).npu(), non_blocking=True)


def _under_autocast() -> torch.Tensor:
    """A product beside host code under autocast, which is not about the device."""
    matrix = torch.eye(4).npu() * 1.001
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return matrix @ matrix


def _in_float64() -> torch.Tensor:
    """A quotient whose dtype is the default of its launch."""
    torch.set_default_dtype(torch.float64)
    try:
        return torch.arange(4).npu() / 7
    finally:
        torch.set_default_dtype(torch.float32)


def _dtype_first_met_in_inference_mode() -> torch.Tensor:
    """Zeros of a dtype that the process uses nowhere else, and whose first tensor was made in inference mode."""
    with torch.inference_mode():
        torch.zeros(4, dtype=torch.uint32, device="npu")
    return torch.zeros(4, dtype=torch.uint32, device="npu")


@pytest.mark.parametrize(
    ("launched", "expected"),
    [
        (_dtype_first_met_in_inference_mode, torch.zeros(4, dtype=torch.uint32)),
        (_of_inference, torch.arange(4.0)),
        (_under_autocast, torch.eye(4) * 1.001 * 1.001),
        (_in_float64, torch.arange(4.0, dtype=torch.float64) / 7),
    ],
)
@pytest.mark.parametrize("schedule", ["fifo", "lazy"])
def test_work_runs_as_it_was_launched(
    schedule: str, launched: Callable[[], torch.Tensor], expected: torch.Tensor
) -> None:
    """Whenever a kernel runs, the host's state at its launch counts, and CPU autocast never."""
    with npu_emulator.schedule(schedule):
        result = launched()
        torch.npu.synchronize()
    torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=0)
    assert torch.get_default_dtype() == torch.float32
