"""Two products with an activation between them, of one pair of weights or of one pair for each expert's rows.

Formula (operator documentation of ``torch_npu.npu_ffn``), for the rows of an expert::

    floating:        y = activation(x @ w1 + b1) @ w2 + b2
    quantised:       h = activation((x @ w1 + b1) * deq_scale1)
                     y = (round(h * scale + offset) @ w2 + b2) * deq_scale2
    anti-quantised:  w = (w + antiquant_offset) * antiquant_scale for both weights, then as floating

The quantised h and its quotient are rounded to the result's dtype, an anti-quantised float16 weight to float16.
``expert_tokens`` has the number of rows of each expert, ``expert_tokens_index`` the row behind the last one of each. Int64
``deq_scale1`` and ``deq_scale2`` are encoded as by ``npu_trans_quant_param``. ``inner_precise`` chooses a kernel of the device.

geglu, swiglu and reglu (CANN's operator sources, ops-transformer, ffn/ffn/op_kernel/ffn_glu.cpp, which gives the halves of the
columns to GeGLU, SwiGLU and ReGlu of Ascend C): left * activation(right), with the tanh form of GELU. They are for one pair of
floating weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._grouped import Factors, GroupRows, multiplied, spans
from npugraph_ex.operators._integers import matrix_of
from npugraph_ex.operators._precision import compute_dtype, gelu, refused, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_weight_quant_batchmatmul import antiquantised

_NAME = "npu_ffn"
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": gelu,
    "fastgelu": lambda y: y * torch.sigmoid(1.702 * y),
    "silu": torch.nn.functional.silu,
}
_OF_HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "swiglu": torch.nn.functional.silu,
    "reglu": torch.relu,
}


def _halves(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


def _own(given: torch.Tensor | None, expert: int, experts: int) -> torch.Tensor | None:
    """The part of a tensor that is an expert's: its row where there is one for each."""
    if given is None or experts == 0 or given.shape[0] != experts:
        return given
    return given[expert]


@Operator(
    name="npu::npu_ffn",
    source="operator documentation of torch_npu.npu_ffn; ops-transformer, ffn/ffn",
    covers={"inner_precise": (None, 0, 1)},
    dtypes=(torch.float16, torch.bfloat16),
    alike=Alike(
        dtype=("x", "weight1", "weight2", "bias1", "bias2"),
        besides={
            **dict.fromkeys(("weight1", "weight2"), (torch.int8, torch.int32)),
            **dict.fromkeys(("bias1", "bias2"), (torch.float32, torch.int32)),
        },
    ),
    examples=(
        lambda: call(_halves(3, 8), _halves(8, 4), _halves(4, 6), "gelu", bias1=_halves(4), bias2=_halves(6)),
        lambda: call(_halves(3, 8), _halves(8, 8), _halves(4, 6), "swiglu"),
        lambda: call(_halves(5, 8), _halves(2, 8, 4), _halves(2, 4, 6), "silu", expert_tokens=[2, 3]),
        lambda: call(
            _small(5, 8), _small(2, 8, 4), _small(2, 4, 6), "relu", expert_tokens=[2, 3], scale=torch.rand(2), offset=torch.rand(2),
            deq_scale1=torch.rand(2, 4), deq_scale2=torch.rand(2, 6),
        ),
        lambda: call(
            _halves(3, 8), _small(8, 4), _small(4, 6), "gelu", antiquant_scale1=_halves(4), antiquant_scale2=_halves(6),
            antiquant_offset1=_halves(4), antiquant_offset2=_halves(6),
        ),
    ),
)  # fmt: skip
def npu_ffn(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    deq_scale1: torch.Tensor | None = None,
    deq_scale2: torch.Tensor | None = None,
    antiquant_scale1: torch.Tensor | None = None,
    antiquant_scale2: torch.Tensor | None = None,
    antiquant_offset1: torch.Tensor | None = None,
    antiquant_offset2: torch.Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[..., n2] like x, or float16 or bfloat16 where x is int8. weight1: [k, n1] or [experts, k, n1]; weight2: [.., n1, n2].

    All else: [n] or [experts, n] of its weight; scale and offset: one number, one for each expert, or [experts, n1].
    """
    function = _ACTIVATIONS.get(activation) or _OF_HALVES.get(activation)
    if function is None:
        raise unsupported(_NAME, "activation", activation, ", ".join((*_ACTIVATIONS, *_OF_HALVES)))
    if activation in _OF_HALVES and (weight1.dim() == 3 or scale is not None or antiquant_scale1 is not None):
        raise refused(_NAME, "activation", activation, f"one of {', '.join(_ACTIVATIONS)} with experts or quantised")
    target = _target(x, output_dtype)
    wide = compute_dtype(x, scale, deq_scale1, antiquant_scale1)
    rows = x.reshape(-1, x.shape[-1])
    experts = weight1.shape[0] if weight1.dim() == 3 else 0
    out = torch.zeros(rows.shape[0], weight2.shape[-1], dtype=wide)
    for expert, start, end in _spans(rows.shape[0], experts, expert_tokens, expert_tokens_index):
        each = [
            _own(tensor, expert, experts)
            for tensor in (
                bias1, bias2, scale, offset, deq_scale1, deq_scale2,
                antiquant_scale1, antiquant_scale2, antiquant_offset1, antiquant_offset2,
            )
        ]  # fmt: skip
        first, second = (weight if experts == 0 else weight[expert] for weight in (weight1, weight2))
        given = rows[start:end]
        first, second = _floating(first, given, each[6], each[8]), _floating(second, given, each[7], each[9])
        hidden = multiplied(given, Factors(first, each[0], each[4])).to(wide)
        if scale is not None and wide != torch.float64:
            hidden = hidden.to(target)  # what the cube unit hands to the vector unit, which goes on in this dtype
        gate, hidden = hidden.chunk(2, -1) if activation in _OF_HALVES else (1, hidden)
        hidden = gate * function(hidden)
        if scale is None:
            out[start:end] = multiplied(hidden, Factors(second, each[1]))
            continue
        quotient = hidden * _number(each[2], hidden.dtype)
        quotient = quotient if each[3] is None else quotient + each[3].to(hidden.dtype)
        quantised = round_to_int8(quotient)
        out[start:end] = multiplied(quantised, Factors(second, each[1], each[5]))
    return out.reshape(*x.shape[:-1], -1).to(target)


def _number(scale: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    return torch.ones((), dtype=wide) if scale is None else scale.to(wide)


def _target(x: torch.Tensor, output_dtype: torch.dtype | None) -> torch.dtype:
    if x.dtype != torch.int8:
        return x.dtype
    target = torch.float16 if output_dtype is None else dtype_of(output_dtype, _NAME, "output_dtype")
    if target not in {torch.float16, torch.bfloat16}:
        raise unsupported(_NAME, "output_dtype", target, "float16 and bfloat16")
    return target


def _floating(
    weight: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None
) -> torch.Tensor:
    """The weight, made floating where it is anti-quantised: in the dtype of the rows, as the vector unit does."""
    if scale is None:
        return weight
    wide = rows.dtype if rows.dtype == torch.float16 else compute_dtype(rows)
    shift = None if offset is None else offset.to(wide)
    k = weight.shape[-2] * (8 if weight.dtype == torch.int32 and weight.stride(-2) == 1 else 1)
    return antiquantised(matrix_of(weight, k), scale.to(wide), shift)


def _spans(rows: int, experts: int, tokens: Sequence[int] | None, index: Sequence[int] | None) -> list[GroupRows]:
    """The rows of each expert; all rows where there are none."""
    if tokens and index:
        raise refused(_NAME, "expert_tokens", list(tokens), "left out where expert_tokens_index is given")
    if experts == 0:
        return [GroupRows(0, 0, rows)]
    if not (tokens or index):
        raise refused(_NAME, "expert_tokens", None, "given, or expert_tokens_index, where there are weights of experts")
    return spans(_NAME, torch.tensor(tokens or index), 1 if tokens else 0, rows, experts)
