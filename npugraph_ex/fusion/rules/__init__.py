"""The built-in fusion rules, one a module: a default set, and an extra set that options switch on.

A module holds its rule as ``RULE``, a ``BuiltInRule``. The package finds its modules, so a new rule is a new file in no list.

``chosen_rules`` traces them on first use. A rule is switched by its name: ``options={"fusion_rules": {name: bool}}``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.preparing import prepare, unusable
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import FusionRule, PreparedRule
from npugraph_ex.fusion.rules._built_in_rule import SIXTEEN_BITS as SIXTEEN_BITS
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule, Operands


def _records() -> Iterator[BuiltInRule]:
    """The records of this package's modules. A module whose name has an underscore in front is not a rule."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            yield importlib.import_module(f"{__name__}.{module.name}").RULE


RECORDS: Mapping[str, BuiltInRule] = MappingProxyType(
    {record.name: record for record in sorted(_records(), key=lambda one: (not one.default, one.order, one.name))}
)
"""All built-in rules by name, in the order in which they are tried."""

DEFAULT_RULES: tuple[FusionRule, ...] = tuple(
    rule for record in RECORDS.values() if record.default for rule in record.variants
)
"""On unless switched off."""

EXTRA_RULES: tuple[FusionRule, ...] = tuple(
    rule for record in RECORDS.values() if not record.default for rule in record.variants
)
"""Off unless switched on."""

BUILT_IN: frozenset[FusionRule] = frozenset((*DEFAULT_RULES, *EXTRA_RULES))
"""All of them. What their functions trace to depends on their arguments alone."""

RULE_NAMES: tuple[str, ...] = tuple(RECORDS)
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


def operands_of(name: str) -> Operands:
    """What a generator of programs has to know of the operands of a rule; nothing special for one that is not built in."""
    return RECORDS[name].operands if name in RECORDS else Operands()


def options_for(name: str | None) -> dict[str, object]:
    """The compile options without which the rule ``name`` is off."""
    record = RECORDS.get(name or "")
    return {} if record is None or record.default else {"fusion_rules": {name: True}}
