"""Gated delta rule over whole sequences, as the prefill of a linear attention needs it.

The formula is that of ``npu_recurrent_gated_delta_rule`` (operator documentation of ``torch_npu.npu_chunk_gated_delta_rule``). The
device computes it in chunks of tokens, which is another order of the same sums; here it is computed step by step.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_recurrent_gated_delta_rule import Steps


def _example() -> Call:
    query, key, value = (
        torch.randn(5, 2, 8),
        torch.nn.functional.normalize(torch.randn(5, 2, 8), dim=-1),
        torch.randn(5, 4, 6),
    )
    return call(
        *(operand.bfloat16() for operand in (query, key, value)),
        beta=torch.rand(5, 4).bfloat16(),
        initial_state=torch.randn(2, 4, 6, 8).bfloat16(),
        actual_seq_lengths=torch.tensor([2, 3], dtype=torch.int32),
        scale=0.25,
        g=-torch.rand(5, 4),
    )


@Operator(
    name="npu::npu_chunk_gated_delta_rule",
    source="operator documentation of torch_npu.npu_chunk_gated_delta_rule",
    dtypes=(torch.bfloat16,),
    alike=Alike(dtype=("query", "key", "value", "beta", "initial_state"), besides={"initial_state": (torch.float32,)}),
    examples=(_example,),
)
def npu_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, final_state)``: o [T, Nv, Dv], bfloat16 (float64 for float64); final_state like ``initial_state`` [B, Nv, Dv, Dk].

    query, key [T, Nk, Dk]; value [T, Nv, Dv]; beta, g [T, Nv]; ``scale`` is 1 where it is left out.
    """
    if beta is None or initial_state is None or actual_seq_lengths is None:
        given = {"beta": beta, "initial_state": initial_state, "actual_seq_lengths": actual_seq_lengths}
        missing = next(name for name, operand in given.items() if operand is None)
        raise unsupported("npu_chunk_gated_delta_rule", missing, None, "a tensor: the device needs it")
    steps = Steps(query, key, value, beta=beta, scale=1.0 if scale is None else scale, g=g)
    out = torch.zeros_like(steps.v)
    final = initial_state.clone(memory_format=torch.contiguous_format)
    begin = 0
    for sequence, length in enumerate(actual_seq_lengths.tolist()):
        current = initial_state[sequence].to(steps.dtype)
        for token in range(begin, begin + length):
            current, out[token] = steps.step(current, token)
        final[sequence] = current.to(final.dtype)
        begin += length
    return steps.rounded(out), final
