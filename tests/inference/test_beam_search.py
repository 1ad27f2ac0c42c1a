"""Beam search of transformers, as docs/faq.md has it: which cache lets the steps replay one capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU
from printed import blocks
from transformers import LlamaConfig, LlamaForCausalLM

from npugraph_ex.frontend.entry.explain import Watch

FAQ = Path(__file__).parents[2] / "docs" / "faq.md"
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
NEW = 12


def _model() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model.to(NPU).half().eval()


def _tokens(model: Any, prompt: list[int], **how: Any) -> list[int]:
    ids = torch.tensor([prompt], device=NPU)
    found = model.generate(ids, num_beams=3, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **how)
    return list(found[0].tolist())


@pytest.mark.slow
def test_beams_reordered_in_place_replay_one_capture() -> None:
    """Tokens are those of eager mode. With the cache of transformers nearly each step is captured, with the page's one is."""
    (code,) = [block.code for block in blocks(FAQ) if "class BeamCache" in block.code]
    page: dict[str, Any] = {}
    exec(code.partition("config = ")[0], page)  # noqa: S102 - what the reader copies
    prompts = ([5, 17, 20], [7, 3, 1], [9, 9, 2])
    eager = [_tokens(_model(), prompt, cache_implementation="static") for prompt in prompts]
    model = _model()
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="npugraph_ex")

    watch = Watch()
    assert _tokens(model, prompts[0], cache_implementation="static") == eager[0]
    assert _captures(watch) > NEW // 2

    torch.compiler.reset()
    cache, made = page["BeamCache"](CONFIG, max_cache_len=32), []
    for prompt, expected in zip(prompts, eager, strict=True):
        cache.reset()
        watch = Watch()
        assert _tokens(model, prompt, past_key_values=cache) == expected
        made.append(_captures(watch))
    assert made[0] <= 2  # a second one where a caller still holds the first one's results
    assert made[-1] == 0


@pytest.mark.slow
def test_the_prompt_is_explained_as_a_matter_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody who calls `generate` can move the length that the static cache counts, and nothing is wrong."""
    expected = _tokens(_model(), [5, 17, 20], cache_implementation="static")
    model = _model()
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="npugraph_ex")
    assert _tokens(model, [5, 17, 20], cache_implementation="static") == expected
    (said,) = [one for one in caplog.messages if one.startswith("This graph cannot be captured")]
    assert said.count("the static cache of transformers") == 1  # for all layers
    assert "move it to the NPU" not in said


def _captures(watch: Watch) -> int:
    return sum(len(entry.captures) for entry in watch.explanation().graphs)
