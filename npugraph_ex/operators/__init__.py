"""What each npu operator computes, written in plain ATen.

Every function has exactly its operator's schema signature. It computes in float32 for float16, bfloat16 and
float32 inputs and rounds once, at each output's documented dtype; for float64 inputs it computes, and answers,
wholly in float64, so that the same function serves as kernel on an emulated device and as judge of one.

``KERNELS`` maps an operator's name without overload to its function, and ``CUSTOM_KERNELS`` does so for operators that
clients of torch_npu define; ``kernel_of`` looks in both. ``before_rounding`` holds, for operators
with int8 outputs, a twin with the same signature whose int8 outputs are replaced by the floating-point quotient
before it is rounded and saturated: a judge needs it to tell a tie from an error.

Nothing here touches a device, a dispatcher or a graph. An argument value that a formula does not cover raises
``UnsupportedArgumentError``, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from npugraph_ex.operators import (
    npu_add_rms_norm_cast,
    npu_add_rms_norm_dynamic_quant,
    npu_add_rms_norm_quant,
    npu_dtype_cast,
    npu_dynamic_quant,
    npu_fused_infer_attention_score,
    npu_fusion_attention_v3,
    npu_grouped_matmul,
    npu_moe_gating_top_k_softmax,
    npu_quant_matmul,
    npu_quantize,
    npu_rms_norm,
    npu_rms_norm_backward,
    npu_rotary_embedding,
    npu_rotary_mul,
    npu_scatter_nd_update,
    npu_swiglu,
    npu_swiglu_quant,
    npu_transpose_batchmatmul,
    qkv_rmsnorm_rope,
)
from npugraph_ex.operators._precision import UnsupportedArgumentError
from npugraph_ex.operators._scalar_types import CODE_OF_DTYPE, DTYPE_OF_CODE

KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "npu::npu_rms_norm": npu_rms_norm.npu_rms_norm,
        "npu::npu_rms_norm_backward": npu_rms_norm_backward.npu_rms_norm_backward,
        "npu::npu_add_rms_norm": npu_rms_norm.npu_add_rms_norm,
        "npu::npu_add_rms_norm_cast": npu_add_rms_norm_cast.npu_add_rms_norm_cast,
        "npu::npu_add_rms_norm_quant": npu_add_rms_norm_quant.npu_add_rms_norm_quant,
        "npu::npu_quantize": npu_quantize.npu_quantize,
        "npu::npu_transpose_batchmatmul": npu_transpose_batchmatmul.npu_transpose_batchmatmul,
        "npu::npu_dynamic_quant": npu_dynamic_quant.npu_dynamic_quant,
        "npu::npu_add_rms_norm_dynamic_quant": npu_add_rms_norm_dynamic_quant.npu_add_rms_norm_dynamic_quant,
        "npu::npu_fusion_attention_v3": npu_fusion_attention_v3.npu_fusion_attention_v3,
        "npu::npu_fusion_attention_grad_v3": npu_fusion_attention_v3.npu_fusion_attention_grad_v3,
        "npu::npu_fused_infer_attention_score": npu_fused_infer_attention_score.npu_fused_infer_attention_score,
        "npu::npu_fused_infer_attention_score_v2": npu_fused_infer_attention_score.npu_fused_infer_attention_score_v2,
        "npu::npu_scatter_nd_update": npu_scatter_nd_update.npu_scatter_nd_update,
        "npu::npu_scatter_nd_update_": npu_scatter_nd_update.npu_scatter_nd_update_,
        "npu::npu_moe_gating_top_k_softmax": npu_moe_gating_top_k_softmax.npu_moe_gating_top_k_softmax,
        "npu::npu_grouped_matmul": npu_grouped_matmul.npu_grouped_matmul,
        "npu::npu_quant_matmul": npu_quant_matmul.npu_quant_matmul,
        "npu::npu_dtype_cast": npu_dtype_cast.npu_dtype_cast,
        "npu::_npu_dtype_cast": npu_dtype_cast._npu_dtype_cast,  # noqa: SLF001 - the operator's own name
        "npu::npu_swiglu": npu_swiglu.npu_swiglu,
        "npu::npu_swiglu_quant": npu_swiglu_quant.npu_swiglu_quant,
        "npu::npu_rotary_mul": npu_rotary_mul.npu_rotary_mul,
    }
)

CUSTOM_KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "vllm::npu_rotary_embedding": npu_rotary_embedding.npu_rotary_embedding,
        "vllm::qkv_rmsnorm_rope": qkv_rmsnorm_rope.qkv_rmsnorm_rope,
    }
)


def kernel_of(name: str) -> Callable[..., Any] | None:
    """The reference of the operator ``name``, as in ``npu::npu_rms_norm``; None when there is none."""
    return KERNELS.get(name) or CUSTOM_KERNELS.get(name)


before_rounding: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "npu::npu_dynamic_quant": npu_dynamic_quant.before_rounding,
        "npu::npu_add_rms_norm_dynamic_quant": npu_add_rms_norm_dynamic_quant.before_rounding,
        "npu::npu_quant_matmul": npu_quant_matmul.before_rounding,
        "npu::npu_quantize": npu_quantize.before_rounding,
        "npu::npu_swiglu_quant": npu_swiglu_quant.before_rounding,
        "npu::npu_add_rms_norm_quant": npu_add_rms_norm_quant.before_rounding,
    }
)

__all__ = [
    "CODE_OF_DTYPE",
    "CUSTOM_KERNELS",
    "DTYPE_OF_CODE",
    "KERNELS",
    "UnsupportedArgumentError",
    "before_rounding",
    "kernel_of",
]
