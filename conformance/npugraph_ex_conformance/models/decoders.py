"""Small random decoders of `transformers`: Llama, Qwen3 with and without experts, and DeepSeek; one token a call.

The layers are the library's own. Around them: a cache of fixed length, a position that is a tensor, so that every step is
one graph; RMS norms as `npu_rms_norm`; and, quantised, int8 linears by `npu_dynamic_quant` and `npu_quant_matmul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from npugraph_ex_conformance.models.quantised_qwen3 import QuantisedLinear, random_qwen3, told_apart

_COMMON = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "attn_implementation": "eager",
    "initializer_range": 0.08,
}  # fmt: skip


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, head_dim=32, **_COMMON)
    return LlamaForCausalLM(config)


def _deepseek(layers: int) -> nn.Module:
    """The first layer dense, the others with eight experts in two groups, two of them chosen, and a shared one."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=layers, num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, q_lora_rank=64,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, **_COMMON,
    )  # fmt: skip
    # Gathers the weights of the chosen experts; the default looks at the values on the host, which no graph can.
    config._experts_implementation = "batched_mm"
    return DeepseekV3ForCausalLM(config)


def _qwen3_moe(layers: int) -> nn.Module:
    """Eight experts in each layer, two of them chosen."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=layers, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, norm_topk_prob=True, **_COMMON,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    return Qwen3MoeForCausalLM(config)


def random_decoder(family: str, *, layers: int, seed: int = 0) -> nn.Module:
    """A `transformers` model with random weights in float32 on the CPU, whose likeliest token is so by a margin.

    Args:
        family: "llama", "qwen3", "qwen3_moe" or "deepseek".
        layers: how many.
        seed: of the weights.
    """
    if family == "qwen3":
        return random_qwen3(layers=layers, seed=seed)
    torch.manual_seed(seed)
    makers: dict[str, Callable[[int], nn.Module]] = {"llama": _llama, "deepseek": _deepseek, "qwen3_moe": _qwen3_moe}
    return told_apart(makers[family](layers).eval())


class Norm(nn.Module):
    """An RMS norm by the npu operator."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = original.weight, original.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same, over the last dimension."""
        y: torch.Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), self.weight, self.epsilon)[0]
        return y


_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Linears of one input, in the order in which `transformers` calls them."""


class _Sibling(nn.Module):
    """One of several int8 linears of one input, which the first of them quantises for all and the last forgets."""

    def __init__(self, linear: QuantisedLinear, quantised: list[tuple[torch.Tensor, ...]], *, last: bool) -> None:
        super().__init__()
        self.linear, self.quantised, self.last = linear, quantised, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """..., in -> ..., out."""
        if not self.quantised:
            self.quantised.append(torch.ops.npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1])))
        result = self.linear.of_quantised(*self.quantised[0])
        if self.last:
            self.quantised.clear()
        return result.view(*x.shape[:-1], -1)


def _quantise(layer: nn.Module, dtype: torch.dtype) -> None:
    """Int8 linears in place of all of a layer's; those of one input share what it is quantised to."""
    _replace(
        layer, lambda module: QuantisedLinear(module, dtype=dtype, last=True) if type(module) is nn.Linear else None
    )
    for module in list(layer.modules()):
        for names in _SIBLINGS:
            if all(isinstance(getattr(module, name, None), QuantisedLinear) for name in names):
                shared: list[tuple[torch.Tensor, ...]] = []
                for name in names:
                    setattr(module, name, _Sibling(getattr(module, name), shared, last=name == names[-1]))


@dataclass
class _CacheNow:
    """The caches of all layers at one position and for so many sequences, with the face of a cache of `transformers`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    position: torch.Tensor
    batch: int

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token's keys and values; all of them, empty places included, which the mask hides."""
        keys, values = self.keys[layer][: self.batch], self.values[layer][: self.batch]
        return keys.index_copy_(2, self.position, key), values.index_copy_(2, self.position, value)


class _ShapesKnown(Exception):  # noqa: N818 - no error: it ends a layer
    """A layer has given its keys and values. What follows may communicate, which a model on the CPU cannot."""


class _Shapes(list[tuple[torch.Size, torch.Size]]):
    """A cache of one token that keeps the shapes of its keys and values, one pair a layer."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        """Keep the shapes, and end the layer."""
        self.append((key.shape, value.shape))
        raise _ShapesKnown


class Decoder(nn.Module):
    """One token of each sequence a call.

    Args:
        original: of `transformers`; becomes part of this model and is changed.
        batch: the largest number of sequences.
        length: of the cache.
        quantised: int8 linears in the layers; the head, the router and routed experts stay as they are.
        dtype: of activations.
    """

    def __init__(
        self, original: nn.Module, *, batch: int, length: int, quantised: bool, dtype: torch.dtype = torch.float16
    ) -> None:
        super().__init__()
        model = original.model
        self.embedding, self.rotary, self.head = model.embed_tokens, model.rotary_emb, original.lm_head
        self.layers, self.norm = model.layers, Norm(model.norm)
        cached = self._cached()
        for layer in self.layers:
            _replace(layer, lambda module: Norm(module) if hasattr(module, "variance_epsilon") else None)
            if quantised:
                _quantise(layer, dtype)
        for index, shapes in enumerate(cached):
            for name, (_, heads, _, width) in zip(("keys", "values"), shapes, strict=True):
                self.register_buffer(f"{name}_{index}", torch.zeros(batch, heads, length, width, dtype=dtype))
        self.register_buffer("slots", torch.arange(length))
        self.to(dtype)
        for module in self.modules():
            if isinstance(module, QuantisedLinear):
                module.scale = module.scale.float()

    @torch.no_grad()
    def _cached(self) -> _Shapes:
        """What each layer keeps of a token: keys and values, or the latent and the rotated key, as late releases do."""
        token, shapes = torch.zeros(1, 1, dtype=torch.int64), _Shapes()
        hidden = self.embedding(token)
        angles = self.rotary(hidden, token)
        for layer in self.layers:
            with contextlib.suppress(_ShapesKnown):
                layer(hidden, attention_mask=None, position_embeddings=angles, past_key_values=shapes)
        return shapes

    def caches(self, name: str) -> list[torch.Tensor]:
        """The caches called "keys" or "values", one a layer."""
        return [getattr(self, f"{name}_{index}") for index in range(len(self.layers))]

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (batch,) and position (1,), both int64 -> logits (batch, vocabulary), hidden states (layers, batch, hidden)."""
        hidden = self.embedding(tokens).unsqueeze(1)
        rotary = self.rotary(hidden, position.unsqueeze(0))
        closed = torch.finfo(hidden.dtype).min
        mask = torch.where(self.slots <= position, 0.0, closed).to(hidden.dtype).view(1, 1, 1, -1)
        cache = _CacheNow(self.caches("keys"), self.caches("values"), position, tokens.shape[0])
        seen = []
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache)
            seen.append(hidden[:, 0])
        return self.head(self.norm(hidden))[:, 0], torch.stack(seen)

    def reset(self) -> None:
        """Empty the cache."""
        for cache in (*self.caches("keys"), *self.caches("values")):
            cache.zero_()


def _replace(root: nn.Module, by: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put what ``by`` makes of a module in its place, wherever it makes something of it."""
    for name, child in list(root.named_children()):
        new = by(child)
        if new is None:
            _replace(child, by)
        else:
            setattr(root, name, new)


@dataclass(frozen=True)
class Decoded:
    """What greedy decoding gave, on the CPU.

    Attributes:
        tokens: the new ones, (batch, new).
        logits: of every call, (calls, batch, vocabulary).
        hidden: of every call after each layer, (calls, layers, batch, hidden).
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor


def decode(step: Callable[..., Any], prompt: torch.Tensor, *, new: int) -> Decoded:
    """Feed the prompt (batch, length), on the device, token by token, then decode greedily."""
    tokens, made, logits, hidden = prompt[:, 0].clone(), [], [], []
    with torch.no_grad():
        for index in range(prompt.shape[1] + new - 1):
            position = torch.full((1,), index, dtype=torch.int64, device=prompt.device)
            result, seen = step(tokens, position)
            logits.append(result.cpu())
            hidden.append(seen.cpu())
            following = result.argmax(-1)
            inside = index + 1 < prompt.shape[1]
            tokens = prompt[:, index + 1].clone() if inside else following
            if not inside:
                made.append(following.cpu())
            del result, seen
    return Decoded(torch.stack(made, 1), torch.stack(logits), torch.stack(hidden))
