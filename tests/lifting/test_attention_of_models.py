"""Models whose attention is spelled with a plain softmax: kernels before and after the declaration, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_emulator
import npugraph_ex

transformers = pytest.importorskip("transformers")
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_Model = Callable[..., torch.Tensor]


class _Block(nn.Module):
    """As nanoGPT has it without flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.c_attn, self.c_proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.ones(16, 16).tril().view(1, 1, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            one.view(batch, time, 4, 16).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * 0.25
        att = att.masked_fill(self.bias[:, :, :time, :time] == 0, float("-inf"))
        y = self.dropout(functional.softmax(att, dim=-1)) @ v
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


def _nano() -> tuple[_Model, tuple[torch.Tensor, ...]]:
    return nn.Sequential(_Block(), _Block()).eval().half().npu(), (torch.randn(2, 12, 64).half().npu(),)


def _vit() -> tuple[_Model, tuple[torch.Tensor, ...]]:
    config = transformers.ViTConfig(**_SIZES, image_size=32, patch_size=8, attn_implementation="eager")
    model = transformers.ViTModel(config).eval().half().npu()
    return lambda x: model(x).last_hidden_state, (torch.randn(1, 3, 32, 32).half().npu(),)


def _bert(*, masked: bool) -> tuple[_Model, tuple[torch.Tensor, ...]]:
    config = transformers.BertConfig(**_SIZES, vocab_size=99, attn_implementation="eager")
    model = transformers.BertModel(config).eval().half().npu()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    given = (torch.randint(0, 99, (2, 9)).npu(), *((mask.npu(),) if masked else ()))
    return lambda ids, *mask: model(ids, *mask).last_hidden_state, given


MODELS: dict[str, tuple[Callable[[], tuple[_Model, tuple[torch.Tensor, ...]]], list[int]]] = {
    "nanoGPT": (_nano, [34, 30, 20]),
    "ViT": (_vit, [40, 32, 24]),
    "BERT": (lambda: _bert(masked=False), [41, 36, 28]),
    "BERT with a mask": (lambda: _bert(masked=True), [60, 41, 38]),
}
"""Kernels in eager mode, with ``lift="judged"``, and with the declaration, as `docs/how-to/fusion.md` has them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_a_call(name: str) -> None:
    """Both layers are lifted, the page's numbers are these, and the values are eager mode's but for roundings."""

    def called(function: _Model) -> tuple[int, torch.Tensor]:
        with torch.inference_mode():
            for _ in range(3):
                function(*given)
            torch.npu.synchronize()
            with npu_emulator.kernel_log() as log:
                result = function(*given)
                torch.npu.synchronize()
        return len(log), result

    torch.manual_seed(0)
    make, expected = MODELS[name]
    model, given = make()
    kernels, eager = called(model)
    found = [kernels]
    for more in ({}, {"every_row_attends": True}):
        torch.compiler.reset()
        options: dict[str, Any] = {"lift": "judged", **more}
        kernels, result = called(torch.compile(model, backend="npugraph_ex", options=options, dynamic=False))
        found.append(kernels)
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions("lift_attention") == 2, report.table()
    assert found == expected
    torch.testing.assert_close(result, eager, rtol=1e-2, atol=2e-2)
