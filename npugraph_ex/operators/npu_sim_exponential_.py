"""Fills a tensor with exponentially distributed random numbers.

Formula (operator documentation of ``torch_npu.npu_sim_exponential_``)::

    input = -ln(1 - u) / lambd,   u uniform from 0 to 1;   zeros where lambd is infinite
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._precision import RefusedArgumentError
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_sim_exponential_"


def _draws(input: torch.Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> bool:  # noqa: A002
    return not math.isinf(lambd)


@Operator(
    name="npu::npu_sim_exponential_",
    source="operator documentation of torch_npu.npu_sim_exponential_",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    draws_random_numbers=_draws,
    examples=(lambda: call(torch.empty(4, 4).fill_(-1.0), 2.0),),
)
def npu_sim_exponential_(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    lambd: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``input`` itself, floating. Numbers come from ``generator``, else from torch's own."""
    if not lambd > 0.0:
        raise RefusedArgumentError(f"{_NAME} expects lambd > 0.0; it is {lambd}.")
    if math.isinf(lambd):
        return input.zero_()
    return input.exponential_(lambd, generator=generator)
