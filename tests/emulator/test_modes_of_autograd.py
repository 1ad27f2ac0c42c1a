"""Eager code runs the same operators with gradients, without them, and in inference mode, as torch_npu does."""

from __future__ import annotations

from collections.abc import Callable

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
