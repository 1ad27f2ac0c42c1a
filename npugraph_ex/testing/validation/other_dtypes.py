"""Settings in which arguments have another dtype than in the rule's examples, and not one that the survey tries anyway.

The matcher compares operators, and `abs` is one operator for floating-point numbers and for integers. A replacement that
relies on negative numbers is wrong for integers that have none. `add` takes operands of two dtypes, too, and promotes them; a
replacement that promotes at another place computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.operators import record_of
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.broadcasting import fused_where_it_runs, plainest
from npugraph_ex.testing.validation.integers import nodes_of
from npugraph_ex.testing.validation.survey import DTYPES, Setting, Surveyed, traced

_INTEGERS = (torch.uint8, torch.int32, torch.bool, torch.int64, torch.int8)
_MASKS = (torch.uint8, torch.bool)
"""What selects elements where another integer is their index: not the same operator, although it has the same name."""


def other_dtypes(
    prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting], *, floating: bool
) -> list[Surveyed]:
    """The settings with another dtype in which eager mode runs the search function, and the rule fuses.

    Args:
        prepared: the rule.
        pattern: the same, as something to plant.
        settings: in which it fuses; the plainest is varied.
        floating: whether arguments that are floating-point numbers in the examples may be others.
    """
    tried = {setting.dtypes for setting in settings}
    base = plainest(settings)
    found: list[Surveyed] = []
    for settings_of in (_varied, _mixed):
        varied = (one for one in settings_of(pattern, base, floating=floating) if one.dtypes not in tried)
        found += fused_where_it_runs(prepared, pattern, varied)
    return [one for one in found if _documented(pattern, one.setting)]


def _documented(pattern: Pattern, setting: Setting) -> bool:
    """Whether the search function's own operators take these dtypes: a formula may take more than the device does."""
    if not any(map(record_of, (node.target for node in nodes_of(pattern)))):
        return True
    dtypes = {
        setting.dtypes[place] for place, one in enumerate(pattern.arguments) if setting.dtypes[place] != one.dtype
    }
    for node in traced(pattern, setting).graph.nodes:
        record = record_of(node.target)
        values = [source.meta.get("val") for source in node.all_input_nodes]
        read = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        if record is not None and record.dtypes and not read & dtypes <= set(record.dtypes):
            return False
    return True


def _varied(pattern: Pattern, base: Setting, *, floating: bool) -> Iterator[Setting]:
    """With another dtype for all arguments that have one dtype now."""
    for old in dict.fromkeys(base.dtypes):
        for new in _others(pattern, old, floating=floating):
            # In place of one floating-point dtype the survey has tried the others, with what has to agree with them.
            if not (old.is_floating_point and new.is_floating_point):
                dtypes = tuple(new if dtype == old else dtype for dtype in base.dtypes)
                yield dataclasses.replace(base, dtypes=dtypes, foreign=True)


def _mixed(pattern: Pattern, base: Setting, *, floating: bool) -> Iterator[Setting]:
    """With another dtype for one of several arguments that have one dtype now."""
    shared = [place for place, dtype in enumerate(base.dtypes) if base.dtypes.count(dtype) > 1]
    choices = {place: _others(pattern, base.dtypes[place], floating=floating) for place in shared}
    # One dtype in each place before the next one: the first few that fuse are tried.
    for number in range(max(map(len, choices.values()), default=0)):
        for place, others in choices.items():
            if number < len(others):
                dtypes = (*base.dtypes[:place], others[number], *base.dtypes[place + 1 :])
                yield dataclasses.replace(base, dtypes=dtypes, foreign=True)


def _others(pattern: Pattern, old: torch.dtype, *, floating: bool) -> list[torch.dtype]:
    """What may stand in place of a dtype."""
    if old.is_floating_point and not floating:
        return []
    masks = _MASKS if any(map(_indexes, nodes_of(pattern))) and not old.is_floating_point else ()
    return [new for new in (*_INTEGERS, *DTYPES) if new != old and new not in masks]


def _indexes(node: fx.Node) -> bool:
    """Whether an operator takes an index or a mask."""
    return isinstance(node.target, torch._ops.OpOverload) and "index" in _torch_private.schema(node.target).name
