"""Which experts a token goes to: vLLM-Ascend's own form of ``npu_moe_gating_top_k``.

Formula (vLLM-Ascend, csrc/moe_gating_top_k): that of ``npu_moe_gating_top_k``; with ``renorm`` 1 and the softmax the weights of the
chosen experts are divided by their sum, which is the softmax of the chosen logits. With the sigmoid they are divided in any case.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_moe_gating_top_k import npu_moe_gating_top_k

_NAME = "_C_ascend::moe_gating_top_k"
_SOFTMAX = 0


def _fake(x: torch.Tensor, k: int, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = x.new_empty(x.shape[0], k)
    return chosen, torch.empty_like(chosen, dtype=torch.int32), torch.empty_like(x, dtype=torch.float32)


@Operator(
    name=_NAME,
    source="vLLM-Ascend, csrc/torch_binding.cpp and csrc/moe_gating_top_k",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    schema=(
        "(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, bool out_flag, "
        "float routed_scaling_factor, float eps, Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)"
    ),
    fake=_fake,
    examples=(
        lambda: call(torch.randn(4, 16), 3, 2, 4, 1, 0, 1, False, 2.5, 1e-20, torch.randn(16)),
        lambda: call(torch.randn(4, 16), 3, 2, 4, 1, 1, 1, False, 2.5, 1e-20, torch.randn(16)),
        lambda: call(torch.randn(4, 16).half(), 2, 1, 1, 1, 1, 0, False, 1.0, 1e-20),
    ),
)
def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, expert_idx, out)``: [rows, k] like x, [rows, k] int32, [rows, experts] float32; bias_opt: [experts]."""
    if renorm not in {0, 1}:
        raise unsupported(_NAME, "renorm", renorm, "0 and 1")
    divides = renorm == 1 and norm_type == _SOFTMAX
    y, chosen, out = npu_moe_gating_top_k(
        x.to(compute_dtype(x)), k, bias=bias_opt, k_group=k_group, group_count=group_count,
        group_select_mode=group_select_mode, norm_type=norm_type, out_flag=out_flag,
        routed_scaling_factor=1.0 if divides else routed_scaling_factor, eps=eps,
    )  # fmt: skip
    if divides:
        y = y / y.sum(-1, keepdim=True) * routed_scaling_factor
    return y.to(x.dtype), chosen, out
