"""Split of query, key and value, their norms, rotary embedding => ``vllm.qkv_rmsnorm_rope``. An extra rule.

vLLM-Ascend's attention layers compute this with a norm for each head, with and without a bias after the norm. The embedding,
``vllm.npu_rotary_embedding``, and the fused operator both belong to vLLM-Ascend; without them the rule is inactive. The value
stays a view of the projection: the fused operator's copy of it is not used.

Constraints (vllm_ascend/ops/triton/linearnorm/split_qkv_rmsnorm_rope.py, and the conditions under which
vllm_ascend/compilation registers the same rewrite): everything is bfloat16, heads have 128 elements, all of which are
embedded, and there are as many query heads for each key head. The projection is a matrix and not empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import holds, value_of
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule, Operands

NAME = "qk_norm_rope"
HEAD_SIZE = 128
_TENSORS = ("qkv", "q_weight", "k_weight", "cos_sin_cache")

_ThreeTensors = tuple[Tensor, Tensor, Tensor]
_NUMBERS: Mapping[str, float] = MappingProxyType(
    {"q_size": 4 * HEAD_SIZE, "kv_size": 2 * HEAD_SIZE, "head_size": HEAD_SIZE, "eps": 0.1875}
)
"""The values of the query and key columns, the head size and epsilon during a trace."""


def _normalised(x: Tensor, weight: Tensor, bias: Tensor | None, head_size: int, eps: float) -> Tensor:
    """Every head of ``x`` (tokens, heads * head size) normalised."""
    heads = x.view(x.shape[0], x.shape[1] // head_size, head_size)
    normed, _ = torch.ops.npu.npu_rms_norm(heads, weight, eps)
    flat: Tensor = (normed if bias is None else normed + bias).view(x.shape)
    return flat


def _search_biased(  # noqa: PLR0913, PLR0917 - the operators' arguments
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    cos_sin_cache: Tensor, positions: Tensor, q_size: int, kv_size: int, head_size: int, eps: float,
) -> _ThreeTensors:  # fmt: skip
    q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
    q, k = (
        _normalised(x, weight, bias, head_size, eps)
        for x, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias))
    )
    rope = torch.ops.vllm.npu_rotary_embedding
    q, k = rope(positions, q, k, cos_sin_cache, head_size, head_size, True)  # noqa: FBT003
    return q, k, v


def _replace_biased(  # noqa: PLR0913, PLR0917 - as above
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None,
    cos_sin_cache: Tensor, positions: Tensor, q_size: int, kv_size: int, head_size: int, eps: float,
) -> _ThreeTensors:  # fmt: skip
    fused: _ThreeTensors = torch.ops.vllm.qkv_rmsnorm_rope(
        input=qkv, cos_sin_cache=cos_sin_cache, positions=positions, q_weight=q_weight, k_weight=k_weight,
        q_hidden_size=q_size, kv_hidden_size=kv_size, head_dim=head_size, eps=eps, q_bias=q_bias, k_bias=k_bias,
    )  # fmt: skip
    return fused


def _search(  # noqa: PLR0913, PLR0917 - as above
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor,
    q_size: int, kv_size: int, head_size: int, eps: float,
) -> _ThreeTensors:  # fmt: skip
    return _search_biased(
        qkv, q_weight, k_weight, None, None, cos_sin_cache, positions, q_size, kv_size, head_size, eps
    )


def _replace(  # noqa: PLR0913, PLR0917 - as above
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor,
    q_size: int, kv_size: int, head_size: int, eps: float,
) -> _ThreeTensors:  # fmt: skip
    return _replace_biased(
        qkv, q_weight, k_weight, None, None, cos_sin_cache, positions, q_size, kv_size, head_size, eps
    )


def _unfit(match: Match, name: str) -> str | None:
    """The first constraint that one floating-point operand violates, if the variant has this operand."""
    value = value_of(match, name)
    if value is None:
        return None
    if value.dtype != torch.bfloat16:
        return f"{name} is {value.dtype}; the fused operator computes in torch.bfloat16"
    if name == "qkv":
        return None
    if not holds(value.shape[-1] == HEAD_SIZE):
        return f"the last dim of {name} is {value.shape[-1]}; the fused operator has heads of {HEAD_SIZE}"
    if name != "cos_sin_cache" and value.dim() != 1:  # a weight of two dimensions means one norm over all heads
        return f"{name} has {value.dim()} dimensions; the fused operator takes one vector for every head"
    return None


def _unsupported(match: Match) -> str | None:
    """The first constraint that the match violates."""
    qkv, cache, positions = (value_of(match, name) for name in ("qkv", "cos_sin_cache", "positions"))
    if qkv is None or cache is None or positions is None or qkv.dim() != 2 or positions.dim() != 1:
        return "the projection must be a matrix and the positions a vector"
    for name in (*_TENSORS, "q_bias", "k_bias"):
        reason = _unfit(match, name)
        if reason is not None:
            return reason
    if not holds(qkv.shape[0] > 0):
        return "there may be no tokens, which the fused operator does not take"
    q_size, kv_size = match.kwargs["q_size"], match.kwargs["kv_size"]
    if match.kwargs["head_size"] != HEAD_SIZE:
        return f"heads have {match.kwargs['head_size']} elements; the fused operator has heads of {HEAD_SIZE}"
    if not holds(q_size % kv_size == 0):
        return f"{q_size} query columns are no multiple of {kv_size} key columns"
    return None if holds(positions.shape[0] == qkv.shape[0]) else "there must be one position for each token"


def _examples() -> list[Tensor]:
    shapes = ((3, 8 * HEAD_SIZE), (HEAD_SIZE,), (HEAD_SIZE,), (16, HEAD_SIZE))
    made = [torch.empty(shape, dtype=torch.bfloat16, device="npu") for shape in shapes]
    return [*made, torch.empty(3, dtype=torch.int64, device="npu")]


def _biased_examples() -> list[Tensor]:
    made = _examples()
    return [*made[:3], *(torch.empty(HEAD_SIZE, dtype=torch.bfloat16, device="npu") for _ in range(2)), *made[3:]]


RULE = BuiltInRule(
    variants=(
        FusionRule(NAME, _search, _replace, _examples, _unsupported, _NUMBERS),
        FusionRule(NAME, _search_biased, _replace_biased, _biased_examples, _unsupported, _NUMBERS),
    ),
    default=False,
    order=20,
    operands=Operands(dtypes=(torch.bfloat16,), small_integers=True),
)
