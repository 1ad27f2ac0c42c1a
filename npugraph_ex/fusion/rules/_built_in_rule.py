"""The record of a built-in rule: its rewrites, their order, and the facts for a generator of programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.rule import FusionRule

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
FLOATING = (*SIXTEEN_BITS, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Requirements on the operands of a rule that its example inputs do not show.

    Attributes:
        dtypes: the dtypes of operands that have 16 bits in the examples.
        dependent: for each of these dtypes, the dtypes of the operands that depend on it, by name.
        numbers: the possible values of numeric operands.
        refused_numbers: numbers with which the rule must not fuse in 16 bits.
        refused_sizes: sizes of the examples, and sizes in their place with which the rule must not fuse.
        takes_empty: whether the rule takes tensors without elements.
        small_integers: whether integer operands are small numbers from 0: zero points, or rows of a table.
        contains_another: whether a variant without its first operators is another variant, which then fuses. A near-miss
            changes the value that the last operator reads.
        occurs_by_chance: whether random programs contain the pattern by themselves. A near-miss is then the whole program.
    """

    dtypes: tuple[torch.dtype, ...] = SIXTEEN_BITS
    dependent: Mapping[torch.dtype, Mapping[str, torch.dtype]] = field(default_factory=dict)
    numbers: tuple[float, ...] = (1e-6, 1e-5, 0.001)
    refused_numbers: tuple[float, ...] = ()
    refused_sizes: tuple[Mapping[int, int], ...] = ()
    takes_empty: bool = False
    small_integers: bool = False
    contains_another: bool = False
    occurs_by_chance: bool = False

    @property
    def takes_single(self) -> bool:
        """Whether the fused operator takes float32 too."""
        return torch.float32 in self.dtypes


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltInRule:
    """A built-in rule. Its module holds it as ``RULE``.

    Attributes:
        variants: the rewrites, in the order of their trials. All have the rule's name.
        default: whether the rule is on unless an option switches it off; otherwise it is off unless an option switches it on.
        order: rules with lower numbers are tried first, default rules before others. The order matters if several patterns
            begin with one operator: the first match takes it.
        anchors: operators, ``namespace::name``, of which every match has one: the rule is not traced for a graph without them.
        operands: the facts for a generator of programs.

    Raises:
        ReplacementError: there is no variant, or they have several names.
    """

    variants: tuple[FusionRule, ...]
    default: bool
    order: int
    anchors: tuple[str, ...] = ()
    operands: Operands = Operands()

    def __post_init__(self) -> None:
        """Check the names."""
        names = sorted({variant.name for variant in self.variants})
        if len(names) != 1:
            raise ReplacementError(f"BuiltInRule, field variants: the variants of one rule have one name, not {names}.")

    @property
    def name(self) -> str:
        """The rule's name, which switches it."""
        return self.variants[0].name
