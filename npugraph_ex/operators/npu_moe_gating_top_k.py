"""Which experts a token goes to, with bias, groups of experts and a scaling factor; and its gradient.

Formula (operator documentation of ``torch_npu.npu_moe_gating_top_k``; CANN's aclnnMoeGatingTopK and aclnnMoeGatingTopKV2)::

    norm_out   = sigmoid(x) with norm_type 1, softmax(x) with norm_type 0
    scores     = norm_out + bias
    group      = max of a group's scores (group_select_mode 0), or the sum of its two highest ones (1)
    expert_idx = topk(scores of the k_group best groups, k)        the lower index first among equals
    y          = norm_out[expert_idx];   with norm_type 1  y = y / (sum(y) + eps)
    y          = y * routed_scaling_factor

With ``input_ids`` and ``tid2eid`` the experts are looked up instead: ``expert_idx = tid2eid[input_ids]``.
Without ``out_flag`` the device leaves ``norm_out`` unwritten; here it is zeros. The gradient reads it.

Not covered: ``renorm`` other than 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_gating_top_k"
_SIGMOID = 1


def _refuse(name: str, renorm: int, norm_type: int) -> None:
    if renorm != 0:
        raise unsupported(name, "renorm", renorm, "0")
    if norm_type not in {0, _SIGMOID}:
        raise unsupported(name, "norm_type", norm_type, "0 (softmax) and 1 (sigmoid)")


def highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the ``k`` highest along the last dimension, in descending order, the lower place first among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True)[1][..., :k]


def _without_other_groups(scores: torch.Tensor, k_group: int, group_count: int, mode: int) -> torch.Tensor:
    """``scores`` with minus infinity for the experts of all but the ``k_group`` best groups."""
    rows, experts = scores.shape
    if mode not in {0, 1}:
        raise unsupported(_NAME, "group_select_mode", mode, "0 (maximum) and 1 (sum of the two highest)")
    if experts % group_count or not 1 <= k_group <= group_count:
        raise ValueError(
            f"{_NAME}: group_count must divide the {experts} experts and k_group lie in 1 to group_count; they are "
            f"{group_count} and {k_group}."
        )
    groups = scores.reshape(rows, group_count, -1)
    value = groups.topk(min(2, groups.shape[-1]), -1)[0].sum(-1) if mode else groups.amax(-1)
    others = torch.ones_like(value, dtype=torch.bool).scatter_(1, highest(value, k_group), value=False)
    return groups.masked_fill(others.unsqueeze(-1), -torch.inf).reshape(rows, experts)


@Operator(
    name="npu::npu_moe_gating_top_k",
    source="operator documentation of torch_npu.npu_moe_gating_top_k",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("x", "bias")),
    examples=(
        lambda: call(torch.randn(4, 16), 3, bias=torch.randn(16), k_group=2, group_count=4, norm_type=1, out_flag=True),
        lambda: call(torch.randn(4, 16).half(), 2, routed_scaling_factor=2.5),
        lambda: call(
            torch.randn(4, 16), 2, input_ids=torch.tensor([1, 0, 1, 2]), tid2eid=torch.tensor([[3, 9], [0, 15], [7, 6]])
        ),
    ),
)
def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, expert_idx, norm_out)``: [rows, k] like x, [rows, k] int32, [rows, experts] float32.

    x: [rows, experts] floating; bias: [experts]; input_ids: [rows]; tid2eid: [identifiers, k].
    """
    _refuse(_NAME, renorm, norm_type)
    if not 1 <= k <= x.shape[1] // group_count * k_group:
        raise ValueError(f"{_NAME}: k must be 1 to the experts of {k_group} groups; it is {k}.")
    wide = x.to(compute_dtype(x))
    norm = torch.sigmoid(wide) if norm_type == _SIGMOID else torch.softmax(wide, -1)
    if input_ids is not None and tid2eid is not None:
        chosen = tid2eid[input_ids.long()].long()
    else:
        scores = norm if bias is None else norm + bias.to(norm.dtype)
        if group_count > 1:
            scores = _without_other_groups(scores, k_group, group_count, group_select_mode)
        chosen = highest(scores, k)
    y = norm.gather(1, chosen)
    if norm_type == _SIGMOID:
        y = y / (y.sum(-1, keepdim=True) + eps)
    written = norm if out_flag else torch.zeros_like(norm)
    return (y * routed_scaling_factor).to(x.dtype), chosen.to(torch.int32), written.contiguous()


@Operator(
    name="npu::npu_moe_gating_top_k_backward",
    source="derivative of npu_moe_gating_top_k; argument list of CANN's aclnnMoeGatingTopKBackward",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(torch.rand(4, 8), torch.randn(4, 2).half(), torch.tensor([[0, 3]] * 4).int(), norm_type=1),
        lambda: call(torch.rand(4, 8).softmax(-1), torch.randn(4, 2), torch.tensor([[0, 3]] * 4).int()),
    ),
)
def npu_moe_gating_top_k_backward(
    x_norm: torch.Tensor,
    grad_y: torch.Tensor,
    expertIdx: torch.Tensor,
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> torch.Tensor:
    """The gradient of ``x``, [rows, experts] of the dtype of ``grad_y``.

    x_norm: [rows, experts], ``norm_out`` of the forward call; grad_y, expertIdx: [rows, k].
    """
    _refuse("npu_moe_gating_top_k_backward", renorm, norm_type)
    norm = x_norm.to(compute_dtype(x_norm, grad_y))
    grad = grad_y.to(norm.dtype) * routed_scaling_factor
    places = expertIdx.long()
    if norm_type == _SIGMOID:
        chosen = norm.gather(1, places)
        total = chosen.sum(-1, keepdim=True) + eps
        grad = grad / total - (grad * chosen).sum(-1, keepdim=True) / total**2
    spread = torch.zeros_like(norm).scatter_add_(1, places, grad)
    if norm_type == _SIGMOID:
        return (spread * norm * (1 - norm)).to(grad_y.dtype)
    return (norm * (spread - (spread * norm).sum(-1, keepdim=True))).to(grad_y.dtype)
