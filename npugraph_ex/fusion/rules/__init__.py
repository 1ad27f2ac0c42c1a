"""The default fusion rules, one fused operator a module. ``prepared_rules`` traces them on first use."""

from __future__ import annotations

from functools import cache

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import FusionRule, PreparedRule, prepare
from npugraph_ex.fusion.rules import add_rms_norm_dynamic_quant

DEFAULT_RULES: tuple[FusionRule, ...] = (*add_rms_norm_dynamic_quant.RULES,)


@cache
def prepared_rules() -> tuple[PreparedRule, ...]:
    """The default rules that this installation can use; one whose operators are missing is warned of and left out."""
    prepared = []
    for rule in DEFAULT_RULES:
        try:
            prepared.append(prepare(rule))
        except ReplacementError as error:
            warn_once(rule.name, str(error))
    return tuple(prepared)
