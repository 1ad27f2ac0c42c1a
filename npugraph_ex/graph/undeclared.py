"""What the schemas of torch_npu leave out: arguments that an operator writes, and returns, without saying so.

Source: the operators' documentation, which calls these caches updated in place, and op-plugin, which returns the very tensors
it was given. Variants that tell the truth (`npu_kv_rmsnorm_rope_cache_v2`) need no entry.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private

__all__ = ["is_undeclared_out", "keep_writers", "writes_undeclared"]

_CACHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "npu::npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache"),
        "npu::npu_rope_quant_kvcache": ("k_cache", "v_cache"),
        "npu::npu_dequant_rope_quant_kvcache": ("k_cache", "v_cache"),
        "npu::npu_mla_prolog": ("kv_cache", "kr_cache"),
        "npu::npu_mla_prolog_v2": ("kv_cache", "kr_cache"),
    }
)


def writes_undeclared(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an operator writes an argument that its schema does not mark."""
    caches = _CACHES.get(_torch_private.schema(overload).name, ())
    return argument.name in caches or is_undeclared_out(overload, argument)


def is_undeclared_out(overload: OpOverload, argument: torch.Argument) -> bool:
    """Whether an argument is the ``Tensor[] out`` of an operator with several results, which no such schema marks."""
    of_npu = overload.namespace == "npu" and torch.Tag.out in overload.tags
    return of_npu and argument.name == "out" and argument.alias_info is None


@functools.cache
def keep_writers() -> None:
    """Tell torch that these operators do something where nobody uses their results; AOT would drop the calls."""
    for name in _CACHES:
        operator = getattr(torch.ops.npu, name.removeprefix("npu::"), None)
        if operator is not None:
            fx.has_side_effect(operator.default)
