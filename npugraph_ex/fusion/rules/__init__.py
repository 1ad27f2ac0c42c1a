"""The built-in fusion rules, one fused operator a module: the default set, and an extra set that options switch on.

``chosen_rules`` traces them on first use. A rule is switched by its name: ``options={"fusion_rules": {name: bool}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.preparing import prepare, unusable
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import FusionRule, PreparedRule
from npugraph_ex.fusion.rules import (
    add_rms_norm_bias_quant,
    add_rms_norm_cast,
    add_rms_norm_dynamic_quant,
    add_rms_norm_quant,
    muls_add,
    qk_norm_rope,
    swiglu_quant,
    transpose_batchmatmul,
)

DEFAULT_RULES: tuple[FusionRule, ...] = (
    *add_rms_norm_dynamic_quant.RULES,
    *add_rms_norm_quant.RULES,
    *add_rms_norm_cast.RULES,
    *transpose_batchmatmul.RULES,
)
"""On unless switched off."""

EXTRA_RULES: tuple[FusionRule, ...] = (
    *add_rms_norm_bias_quant.RULES,
    *qk_norm_rope.RULES,
    *swiglu_quant.RULES,
    *muls_add.RULES,
)
"""Off unless switched on."""

BUILT_IN: frozenset[FusionRule] = frozenset((*DEFAULT_RULES, *EXTRA_RULES))
"""All of them. What their functions trace to depends on their arguments alone."""

RULE_NAMES: tuple[str, ...] = tuple(dict.fromkeys(rule.name for rule in (*DEFAULT_RULES, *EXTRA_RULES)))
"""The names of the built-in rules; several variants may carry one."""


@cache
def _usable(rule: FusionRule) -> PreparedRule:
    """The rule, traced; an exception, which is not remembered, when an operator is missing that may come later."""
    prepared = prepare(rule)
    if prepared.inactive:
        raise ReplacementError(prepared.inactive)
    return prepared


def _prepared(rule: FusionRule) -> PreparedRule:
    try:
        return _usable(rule)
    except ReplacementError as error:
        warn_once(rule.name, str(error))
        return unusable(rule, str(error))


def forget() -> None:
    """Trace the rules anew when they are next asked for: operators came or went."""
    _usable.cache_clear()


def prepared_rules(*, extra: bool = False, name: str | None = None) -> tuple[PreparedRule, ...]:
    """The default rules, or the extra ones, or those of one name; one that cannot be used here is inactive, with a warning."""
    rules = EXTRA_RULES if extra else DEFAULT_RULES
    return tuple(_prepared(rule) for rule in rules if name in {None, rule.name})


def chosen_rules(switches: Mapping[str, bool]) -> tuple[PreparedRule, ...]:
    """The default rules, and those of the extra ones that ``switches`` turns on by name."""
    return (*prepared_rules(), *(_prepared(rule) for rule in EXTRA_RULES if switches.get(rule.name)))
