"""What must hold for the operands of the built-in rules and does not show in their example inputs; as data, by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from npugraph_ex.fusion.rules import EXTRA_RULES, add_rms_norm_quant

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_ALL = (*SIXTEEN_BITS, torch.float32)


@dataclass(frozen=True)
class Constraints:
    """What a generator has to know of a rule beside its example inputs.

    Attributes:
        dtypes: which the operands may have that have 16 bits in its examples.
        operands: for each of these dtypes, the dtypes of the operands that depend on it, by name.
        numbers: what the numeric operands may be.
        refused: numbers with which it must not be fused in 16 bits.
        takes_empty: whether it takes tensors without elements.
        small_integers: whether integer operands are small numbers from 0: zero points, or rows of a table.
        nested: whether what is left of a spoiled variant may be another variant, which fuses then; only the value that the
            last operator reads is spoiled.
        common: whether random programs contain the pattern without its being planted; its near-misses then stand alone.
    """

    dtypes: tuple[torch.dtype, ...] = SIXTEEN_BITS
    operands: Mapping[torch.dtype, Mapping[str, torch.dtype]] = field(default_factory=dict)
    numbers: tuple[float, ...] = (1e-6, 1e-5, 0.001)
    refused: tuple[float, ...] = ()
    takes_empty: bool = False
    small_integers: bool = False
    nested: bool = False
    common: bool = False

    @property
    def takes_single(self) -> bool:
        """Whether the fused operator takes float32 too."""
        return torch.float32 in self.dtypes


_QUANTISED = Constraints(
    operands={
        dtype: {"scales": scales, "zero_points": points}
        for dtype, (scales, points) in add_rms_norm_quant.DTYPES.items()
    },
    small_integers=True,
)

_BY_RULE: Mapping[str, Constraints] = MappingProxyType(
    {
        "add_rms_norm_quant": _QUANTISED,
        "add_rms_norm_bias_quant": _QUANTISED,
        "transpose_batchmatmul": Constraints(dtypes=_ALL, nested=True),
        "swiglu_quant": Constraints(dtypes=_ALL),
        "muls_add": Constraints(
            numbers=(0.1875, -2.0, 0.001),
            refused=(0.001, 1e-6, 0.1),
            dtypes=_ALL,
            takes_empty=True,
            common=True,
        ),
        "qk_norm_rope": Constraints(dtypes=(torch.bfloat16,), small_integers=True),
    }
)

_EXTRA = frozenset(rule.name for rule in EXTRA_RULES)


def constraints_of(rule: str) -> Constraints:
    """The constraints of a rule; none for one that is not built in."""
    return _BY_RULE.get(rule, Constraints())


def options_for(rule: str | None) -> dict[str, object]:
    """The compile options without which ``rule`` is off."""
    return {"fusion_rules": {rule: True}} if rule in _EXTRA else {}
