"""The built-in fusion rules, one fused operator a module: the default set, and an extra set that options switch on.

``chosen_rules`` traces them on first use. A rule is switched by its name: ``options={"fusion_rules": {name: bool}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import FusionRule, PreparedRule, prepare
from npugraph_ex.fusion.rules import (
    add_rms_norm_bias_quant,
    add_rms_norm_cast,
    add_rms_norm_dynamic_quant,
    add_rms_norm_quant,
    muls_add,
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

EXTRA_RULES: tuple[FusionRule, ...] = (*add_rms_norm_bias_quant.RULES, *swiglu_quant.RULES, *muls_add.RULES)
"""Off unless switched on."""

RULE_NAMES: tuple[str, ...] = tuple(dict.fromkeys(rule.name for rule in (*DEFAULT_RULES, *EXTRA_RULES)))
"""The names of the built-in rules; several variants may carry one."""


@cache
def _prepared(rule: FusionRule) -> PreparedRule | None:
    try:
        return prepare(rule)
    except ReplacementError as error:
        warn_once(rule.name, str(error))
        return None


def prepared_rules(*, extra: bool = False) -> tuple[PreparedRule, ...]:
    """The default rules, or the extra ones, that this installation can use; an unusable one is warned of and left out."""
    prepared = (_prepared(rule) for rule in (EXTRA_RULES if extra else DEFAULT_RULES))
    return tuple(rule for rule in prepared if rule is not None)


def chosen_rules(switches: Mapping[str, bool]) -> tuple[PreparedRule, ...]:
    """The default rules, and those of the extra ones that ``switches`` turns on by name."""
    extra = (_prepared(rule) for rule in EXTRA_RULES if switches.get(rule.name))
    return (*prepared_rules(), *(rule for rule in extra if rule is not None))
