"""The custom operators of vLLM-Ascend that a fusion rule is about, by their references where there is no vLLM-Ascend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.fusion import rules, traces
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.operators import CUSTOM_KERNELS

SCHEMAS = {
    "npu_rotary_embedding": (
        "Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, SymInt head_size, SymInt rotary_dim, "
        "bool is_neox_style) -> (Tensor, Tensor"
    ),
    "qkv_rmsnorm_rope": (
        "Tensor input, Tensor cos_sin_cache, Tensor positions, Tensor q_weight, Tensor k_weight, SymInt q_hidden_size, "
        "SymInt kv_hidden_size, SymInt head_dim, float eps, Tensor? q_bias=None, Tensor? k_bias=None"
        ") -> (Tensor, Tensor, Tensor"
    ),
}
"""As vLLM-Ascend's Python functions give them to torch's schema inference."""


def _fake_embedding(*arguments: Any) -> Any:
    return tuple(torch.empty_like(value, memory_format=torch.contiguous_format) for value in arguments[1:3])


def _fake_attention_inputs(*arguments: Any) -> Any:
    x, q_size, kv_size = arguments[0], arguments[5], arguments[6]
    return tuple(x.new_empty(x.shape[0], size) for size in (q_size, kv_size, kv_size))


FAKES: dict[str, Callable[..., Any]] = {
    "npu_rotary_embedding": _fake_embedding,
    "qkv_rmsnorm_rope": _fake_attention_inputs,
}


@contextmanager
def client_operators() -> Iterator[None]:
    """Within the block, the operators exist, and the rule about them can be prepared."""
    if all(hasattr(torch.ops.vllm, name) for name in SCHEMAS):
        yield
        return
    with _torch_private.scoped_library("vllm") as library:
        for name, schema in SCHEMAS.items():
            library.define(f"{name}({schema})")
            library.impl(name, CUSTOM_KERNELS[f"vllm::{name}"], "CompositeExplicitAutograd")
            torch.library.register_fake(f"vllm::{name}", FAKES[name], lib=library)
        warn_once.cache_clear()
        yield
    rules.forget()
    traces.forget()
    warn_once.cache_clear()
