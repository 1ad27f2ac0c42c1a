"""The models: small, with random weights, made by transformers, which in float32 on the CPU is also their judge.

The weights are so large that attention decides which token comes next; with the usual ones the embedding alone does, outputs
fall into loops, and equal tokens prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from npugraph_ex_conformance.vllm_ascend.quantised import DYNAMIC, STATIC, quantise, write_description

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from npugraph_ex_conformance.vllm_ascend.engine import Answer

__all__ = ["MODELS", "VOCABULARY", "apart", "difference", "make"]

VOCABULARY = 512
HEAD = 128
"""Elements of a head: those that the client's QKNormRope takes."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
_HEADS: dict[str, Any] = {"head_dim": HEAD}
_ROUTER: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What transformers always does for DeepSeek-V3, and vLLM reads from the configuration."""


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            **_COMMON, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def _qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_COMMON, **_HEADS, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True, tie_word_embeddings=False,
        )
    )  # fmt: skip


def _deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_COMMON, **_ROUTER, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64,
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1,
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
            moe_intermediate_size=128, norm_topk_prob=True, routed_scaling_factor=1.0, tie_word_embeddings=False,
        )
    )  # fmt: skip


class Model(NamedTuple):
    """A model.

    Attributes:
        build: makes it.
        fused: the kernels of fusions that have to run in its replays.
        quantised: how: a kind of `quantised`'s, or empty.
        seed: of its weights: one with which outputs do not loop, and no two experts are so near that bfloat16 takes the other.
        from_float32: how far a logprob may be from that in float32: about twice what the rounding of its values costs.
        for_fusions: only for the table of fusions: no further schedules, modes and controls.
    """

    build: Callable[[], nn.Module]
    fused: tuple[str, ...] = ()
    quantised: str = ""
    from_float32: float = 0.2
    seed: int = 7
    for_fusions: bool = False


_NORM_ROPE = "vllm.qkv_rmsnorm_rope.default"
_NORM_QUANT = "npu.npu_add_rms_norm_quant.default"
_NORM_DYNAMIC = "npu.npu_add_rms_norm_dynamic_quant.default"
MODELS = {
    "qwen3": Model(_qwen3, (_NORM_ROPE,)),
    "qwen3-moe": Model(_qwen3_moe, (_NORM_ROPE,), seed=4),
    "deepseek": Model(_deepseek, seed=0),
    "qwen3-w8a8": Model(_qwen3, (_NORM_ROPE, _NORM_DYNAMIC), quantised=DYNAMIC, from_float32=0.5),
    "qwen3-w8a8-static": Model(_qwen3, (_NORM_ROPE, _NORM_QUANT), quantised=STATIC, from_float32=1.0, seed=45),
    "qwen3-moe-w8a8": Model(
        _qwen3_moe, (_NORM_ROPE, _NORM_DYNAMIC), quantised=DYNAMIC, from_float32=1.0, seed=1, for_fusions=True
    ),
    "qwen3-moe-w8a8-static": Model(
        _qwen3_moe, (_NORM_ROPE, _NORM_QUANT), quantised=STATIC, from_float32=1.0, seed=18, for_fusions=True
    ),
    "deepseek-w8a8": Model(_deepseek, (_NORM_DYNAMIC,), quantised=DYNAMIC, from_float32=1.0, seed=15, for_fusions=True),
    "deepseek-w8a8-static": Model(
        _deepseek, (_NORM_QUANT,), quantised=STATIC, from_float32=1.0, seed=28, for_fusions=True
    ),
}
"""The models by name. With activations rounded to int8 a token at a time and all else in float32, logprobs move by 0.26; the static
one, whose judge rounds activations too, moves by 0.44 where transformers computes in bfloat16."""

_SPREAD = {"embed_tokens": 0.3, "lm_head": 0.15, "mlp.gate.weight": 0.5}
"""The standard deviations of weights by a part of their names, …"""
_OTHERS = 0.12
"""… and of the others."""


def make(name: str, folder: Path) -> nn.Module:
    """Write a model in bfloat16 to a folder, as the engine reads it; return it with the same weights in float32."""
    torch.manual_seed(MODELS[name].seed)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            drawn = torch.randn_like(weight)
            spread = next((found for part, found in _SPREAD.items() if part in path), _OTHERS)
            weight.copy_(1 + 0.2 * drawn if "norm" in path else spread * drawn)
    model.to(torch.bfloat16)
    written: Any = model
    written.save_pretrained(folder)
    model = model.float()
    if MODELS[name].quantised:
        weights = quantise(model, MODELS[name].quantised)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        write_description(weights, MODELS[name].quantised, folder)
    return model


def difference(judge: nn.Module, answers: Sequence[Answer]) -> float:
    """The largest difference between a logprob that the engine gave and the judge's after the same tokens."""
    worst = 0.0
    for answer in answers:
        with torch.no_grad():
            logits = judge(torch.tensor([answer.prompt + answer.tokens])).logits[0]
        expected = logits[len(answer.prompt) - 1 : -1].log_softmax(-1)
        found = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        worst = max(worst, (found - torch.tensor(answer.logprobs)).abs().max().item())
    return worst


def apart(judge: nn.Module, one: Answer, other: Answer) -> float:
    """How far apart the judge's logprobs of the first different tokens of two answers are, after what they have in common.

    Two tokens that are as near to each other as the kernels' rounding may come in either order, and what follows is another text.
    """
    place = next(place for place, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = judge(torch.tensor([one.prompt + one.tokens[:place]])).logits[0, -1]
    return abs(float(logits[one.tokens[place]] - logits[other.tokens[place]]))
