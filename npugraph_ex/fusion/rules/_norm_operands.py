"""The common operands and constraints of the fused operators that begin with ``npu_add_rms_norm``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch._inductor.pattern_matcher import Match

from npugraph_ex.fusion.conditions import holds, same_sizes, value_of

EPSILON = {"epsilon": 0.1875}
"""The value of epsilon during a trace, where it is a wildcard. No operator has this value as a default."""


@dataclass(frozen=True)
class NormOperands:
    """Documented constraints on x1, x2, gamma and vectors like it; a condition of a rule.

    Attributes:
        dtypes: the dtypes of all operands.
        ranks: the ranks of x1 and x2.
        vectors: arguments that must be vectors of x1's last size and dtype, if the variant has them.
        last_bytes: the last dimension's size in bytes is a multiple of this.
    """

    dtypes: Collection[torch.dtype]
    ranks: range
    vectors: Sequence[str] = ()
    last_bytes: int = 1

    def __call__(self, match: Match) -> str | None:
        """The first constraint that the match violates."""
        x1, x2 = value_of(match, "x1"), value_of(match, "x2")
        if x1 is None or x2 is None:
            return "x1 and x2 must be tensors"
        if x1.dtype not in self.dtypes:
            return f"x1 is {x1.dtype}; the fused operator takes {' and '.join(map(str, self.dtypes))}"
        if x1.dim() not in self.ranks:
            return f"x1 has {x1.dim()} dimensions; the fused operator takes {self.ranks.start} to {self.ranks.stop - 1}"
        if not holds(x1.numel() > 0):
            return "x1 may be empty, which the fused operator does not take"
        if x2.dtype != x1.dtype or not same_sizes(x1, x2):
            return f"x1 is {shown(x1)} and x2 {shown(x2)}; the fused operator takes equal ones"
        if not holds(x1.shape[-1] * x1.element_size() % self.last_bytes == 0):
            return (
                f"last dim {x1.shape[-1]} of x1 takes {x1.shape[-1] * x1.element_size()} bytes, "
                f"not a multiple of {self.last_bytes}"
            )
        gamma = value_of(match, "gamma")
        if gamma is not None and gamma.dtype != x1.dtype:
            return f"gamma is {gamma.dtype} and x1 {x1.dtype}"
        reasons = (not_a_vector(match, name, x1, x1.dtype) for name in self.vectors)
        return next((reason for reason in reasons if reason), None)


def not_a_vector(match: Match, name: str, x1: torch.Tensor, dtype: torch.dtype) -> str | None:
    """None if the argument is missing or is a ``dtype`` vector of the last size of ``x1``, otherwise a description of it."""
    value = value_of(match, name)
    if value is None or (value.dtype == dtype and value.dim() == 1 and holds(value.shape[0] == x1.shape[-1])):
        return None
    return f"{name} must be a {dtype} vector of x1's last size, {x1.shape[-1]}; it is {shown(value)}"


def shown(value: torch.Tensor) -> str:
    """Dtype and shape for a person: ``torch.float16[4, 64]``."""
    return f"{value.dtype}{list(value.shape)}"


def examples(*vectors: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x1, x2, gamma, and one vector of each dtype in ``vectors``; sizes do not matter."""
    rows = [torch.empty(2, 16, dtype=torch.float16, device="npu") for _ in range(2)]
    return (*rows, *(torch.empty(16, dtype=dtype, device="npu") for dtype in (torch.float16, *vectors)))


def deeper_examples(*vectors: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The same with x1 and x2 of three dimensions."""
    rows = [torch.empty(2, 3, 16, dtype=torch.float16, device="npu") for _ in range(2)]
    return (*rows, *examples(*vectors)[2:])
