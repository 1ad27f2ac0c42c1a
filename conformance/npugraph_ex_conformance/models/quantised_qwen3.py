"""A Qwen3 decoder of `transformers`, mapped to npu operators: the weights and the configuration are its own.

RMS norms become `npu_rms_norm` and, with the residual sum, `npu_add_rms_norm`; linears become dynamic int8 quantisation and
`npu_quant_matmul`; the cache has a fixed length and the position is a tensor, so that every decoding step is one graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:  # its import takes longer than that of all the suite's modules, and a run without models needs none
    from transformers import Qwen3ForCausalLM

_EMBEDDING_GAIN = 10.0


def random_qwen3(*, layers: int, seed: int = 0) -> Qwen3ForCausalLM:
    """A small decoder of Qwen3's architecture with random weights, float32 on the CPU, eager attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        attn_implementation="eager", initializer_range=0.08,
    )  # fmt: skip
    return told_apart(Qwen3ForCausalLM(config).eval())


def told_apart(model: nn.Module) -> nn.Module:
    """The model with one token likelier than all others by a margin, as a trained model has it.

    The head's rows become the embedding's, permuted, and the embedding large enough to be felt at the end. With
    independent random weights the best two tokens are often closer than int8 rounding, and equal tokens mean nothing.
    """
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        model.lm_head.weight.copy_(embedding[torch.randperm(len(embedding))])
        embedding.mul_(_EMBEDDING_GAIN)
    return model


class QuantisedLinear(nn.Module):
    """Linears that share their input, with int8 weights and one scale a column.

    Args:
        linears: their outputs are concatenated.
        dtype: of the result.
        last: take inputs of any number of dimensions and keep all but the last.
    """

    def __init__(self, *linears: nn.Linear, dtype: torch.dtype, last: bool = False) -> None:
        super().__init__()
        self.last = last
        weight = torch.cat([linear.weight.detach() for linear in linears]).t()  # in, out
        scale = weight.abs().amax(0) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8).contiguous())
        self.register_buffer("scale", scale.float())
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens, in -> tokens, out; with ``last``, ..., in -> ..., out."""
        if self.last:
            return self._of_rows(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return self._of_rows(x)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_quantised(*torch.ops.npu.npu_dynamic_quant(x))

    def of_quantised(self, quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Int8 tokens, in, and a float32 scale a token -> tokens, out."""
        return torch.ops.npu.npu_quant_matmul(
            quantised, self.weight, self.scale, pertoken_scale=scale, output_dtype=self.dtype
        )


class Attention(nn.Module):
    """Qwen3's attention of one new token over a cache of fixed length."""

    def __init__(self, original: nn.Module, *, batch: int, length: int, dtype: torch.dtype) -> None:
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, eager_attention_forward

        super().__init__()
        self.rotate, self.attend = apply_rotary_pos_emb, eager_attention_forward
        self.original = [original]  # read for its constants by transformers' attention function; no parameters of ours
        self.qkv = QuantisedLinear(original.q_proj, original.k_proj, original.v_proj, dtype=dtype)
        self.output = QuantisedLinear(original.o_proj, dtype=dtype)
        self.q_norm, self.k_norm = original.q_norm, original.k_norm
        self.head_dim = original.head_dim
        config = original.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        shape = (batch, self.kv_heads, length, self.head_dim)
        self.register_buffer("keys", torch.zeros(shape, dtype=dtype))
        self.register_buffer("values", torch.zeros(shape, dtype=dtype))

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """Batch, hidden -> batch, hidden; the cache at ``position`` is written."""
        batch = x.shape[0]
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        query, key, value = (part.view(batch, 1, -1, self.head_dim) for part in self.qkv(x).split(sizes, dim=-1))
        query = torch.ops.npu.npu_rms_norm(query.contiguous(), self.q_norm.weight, self.q_norm.variance_epsilon)[0]
        key = torch.ops.npu.npu_rms_norm(key.contiguous(), self.k_norm.weight, self.k_norm.variance_epsilon)[0]
        query, key = self.rotate(query.transpose(1, 2), key.transpose(1, 2), *rotary)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value.transpose(1, 2))
        original = self.original[0]
        mixed, _ = self.attend(original, query, self.keys, self.values, mask, scaling=original.scaling)
        return self.output(mixed.reshape(batch, -1))


class Layer(nn.Module):
    """One decoder layer over the pair (hidden, residual), so that each norm takes the residual sum with it."""

    def __init__(self, original: nn.Module, *, batch: int, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = Attention(original.self_attn, batch=batch, length=length, dtype=dtype)
        self.before, self.after = original.input_layernorm, original.post_attention_layernorm
        self.up = QuantisedLinear(original.mlp.gate_proj, original.mlp.up_proj, dtype=dtype)
        self.down = QuantisedLinear(original.mlp.down_proj, dtype=dtype)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, *context: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch, hidden, twice -> the same."""
        x, residual = _add_norm(hidden, residual, self.before)
        x, residual = _add_norm(self.attention(x, *context), residual, self.after)
        return self.down(torch.ops.npu.npu_swiglu(self.up(x))), residual


def _add_norm(hidden: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, total = torch.ops.npu.npu_add_rms_norm(hidden, residual, norm.weight, norm.variance_epsilon)
    return y, total


class QuantisedDecoder(nn.Module):
    """The whole model, one token of each sequence a call.

    Args:
        original: of ``transformers``; its weights are quantised and its norms are used as they are.
        batch: how many sequences.
        length: of the cache.
        dtype: of activations.
    """

    def __init__(
        self, original: Qwen3ForCausalLM, *, batch: int, length: int, dtype: torch.dtype = torch.float16
    ) -> None:
        super().__init__()
        model = original.model
        self.embedding, self.rotary, self.norm, self.head = (
            model.embed_tokens,
            model.rotary_emb,
            model.norm,
            original.lm_head,
        )
        self.layers = nn.ModuleList(Layer(layer, batch=batch, length=length, dtype=dtype) for layer in model.layers)
        self.register_buffer("slots", torch.arange(length))
        self.to(dtype)
        for layer in self.modules():
            if isinstance(layer, QuantisedLinear):
                layer.scale = layer.scale.float()

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (batch,) and position (1,), both int64 -> logits (batch, vocabulary), hidden states (layers, batch, hidden)."""
        hidden = self.embedding(tokens)
        residual = torch.zeros_like(hidden)
        rotary = self.rotary(hidden.unsqueeze(1), position.unsqueeze(0))
        mask = (
            torch.where(self.slots <= position, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype).view(1, 1, 1, -1)
        )
        seen = []
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, position, rotary, mask)
            seen.append(hidden + residual)
        return self.head(_add_norm(hidden, residual, self.norm)[0]), torch.stack(seen)

    def reset(self) -> None:
        """Empty the cache."""
        for layer in self.layers:
            layer.attention.keys.zero_()
            layer.attention.values.zero_()
