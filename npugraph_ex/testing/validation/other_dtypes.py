"""Settings in which arguments have another dtype than in the rule's examples, and not one that the survey tries anyway.

The matcher compares operators, and `abs` is one operator for floating-point numbers and for integers. A replacement that
relies on negative numbers is wrong for integers that have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import fx

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
    varied = (one for one in _varied(pattern, plainest(settings), floating=floating) if one.dtypes not in tried)
    return [one for one in fused_where_it_runs(prepared, pattern, varied) if _documented(pattern, one.setting)]


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
    masks = _MASKS if any(map(_indexes, nodes_of(pattern))) else ()
    for old in dict.fromkeys(base.dtypes):
        if old.is_floating_point and not floating:
            continue
        for new in (*_INTEGERS, *DTYPES):
            # In place of one floating-point dtype the survey has tried the others, with what has to agree with them.
            index = new in masks and not old.is_floating_point
            if new != old and not index and not (old.is_floating_point and new.is_floating_point):
                dtypes = tuple(new if dtype == old else dtype for dtype in base.dtypes)
                yield dataclasses.replace(base, dtypes=dtypes, foreign=True)


def _indexes(node: fx.Node) -> bool:
    """Whether an operator takes an index or a mask."""
    return isinstance(node.target, torch._ops.OpOverload) and "index" in node.target._schema.name
