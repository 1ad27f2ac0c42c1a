"""Registers a rule without its guard for a block, to see what the guard refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule, always


@contextmanager
def without_guard(prepared: PreparedRule) -> Iterator[None]:
    """Within the block the rule is registered a second time, under its own name, with no condition."""
    rule = dataclasses.replace(prepared.rule, condition=always)
    with USER_RULES.add(dataclasses.replace(prepared, rule=rule, key=(*prepared.key, "without its guard"))):
        yield
