"""Decoders of transformers with a sliding window: which cache a session refuses, and the one that docs/how-to/sessions.md makes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from device_helpers import NPU
from torch import nn
from transformers import StaticCache

from npugraph_ex.errors import SessionError
from npugraph_ex.inference import session

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sessions.md"
WINDOW, STEPS, PROMPT = 6, 14, (5, 17, 20)
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma3Text": {"head_dim": 8},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}


class Step(nn.Module):
    """The logits after one more token."""

    def __init__(self, model: Any, cache: StaticCache) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> Any:
        """One step."""
        return self.model(ids, None, None, self.cache, cache_position=position).logits[:, -1]


def _model(name: str, window: int) -> Any:
    """With weights large enough that the tokens before the window would be seen."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, sliding_window=window, **MODELS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    if hasattr(model, "set_experts_implementation"):  # in transformers 5, where the default has no float16
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model.to(NPU).half().eval()


def _whole(config: Any) -> Any:
    """As the page has it."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def _decoded(model: Any, of_cache: Any, make: Callable[..., Any]) -> tuple[list[int], torch.Tensor]:
    cache, step = StaticCache(of_cache, max_cache_len=32), None
    tokens, steps = list[int](), list[torch.Tensor]()
    with torch.inference_mode():
        logits = Step(model, cache)(torch.tensor([PROMPT], device=NPU), torch.arange(len(PROMPT), device=NPU))
        for position in range(len(PROMPT), len(PROMPT) + STEPS):
            given = logits.argmax(-1, keepdim=True), torch.tensor([position], device=NPU)
            tokens.append(int(given[0].item()))
            step = step or make(Step(model, cache), given)
            logits = step(*given)
            steps.append(logits.float().cpu())
    return tokens, torch.cat(steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3Text", "GptOss"])  # the page has Mistral
def test_a_cache_that_keeps_all_tokens_leaves_the_window_to_the_masks(name: str) -> None:
    """Tokens and logits are those of eager mode with the sliding cache, over two windows; a wide window gives others."""
    model = _model(name, WINDOW)
    tokens, logits = _decoded(model, model.config, lambda step, _: step)
    replayed_tokens, replayed = _decoded(model, _whole(model.config), session)
    assert replayed_tokens == tokens
    torch.testing.assert_close(replayed, logits, rtol=0, atol=0.01)
    wide = _model(name, 32)
    assert (_decoded(wide, wide.config, lambda step, _: step)[1] - logits).abs().max() > 0.05


@pytest.mark.slow
def test_a_sliding_cache_is_refused_with_the_page_that_helps() -> None:
    """The number that is changed is the package's; its attributes are not all listed, and what fills the cache is said."""
    model = _model("Mistral", WINDOW)
    given = torch.tensor([[4]], device=NPU), torch.tensor([3], device=NPU)
    with torch.inference_mode():
        cache = StaticCache(model.config, max_cache_len=32)
        with pytest.raises(SessionError) as refused:
            session(Step(model, cache), given)
        said = str(refused.value)
        assert "Step cannot be a session: its code changes Step.cache.layers[0]." in said
        assert re.search(r" and \d+ more,", said)
        assert said.endswith("needs such a call before: call Step once")
        Step(model, cache)(*given)
        with pytest.raises(SessionError) as refused:
            session(Step(model, cache), given)
    said = str(refused.value)
    counter = re.search(r"Step\.cache\.layers\[0\]\.(\w+), Step\.cache\.layers\[1\]\.\1, which a replay", said)
    assert counter is not None, said
    assert f"{counter[1]} is a number that StaticSlidingWindowLayer of the installed package transformers keeps" in said
    assert "docs/how-to/sessions.md#sliding-windows does so" in said
    assert "call Step once" not in said
    assert "self.total" not in said
    assert "\n### Sliding windows\n" in PAGE.read_text(encoding="utf-8")
