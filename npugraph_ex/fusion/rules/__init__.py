"""The built-in fusion rules, one a module: a default set, and an extra set that options switch on.

A module holds its rule as ``RULE``, a ``BuiltInRule``. The package finds its modules, so a new rule is only a new file.

``chosen_rules`` traces them when a graph first has their operators. The name switches a rule:
``options={"fusion_rules": {name: bool}}``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import fx

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.preparing import prepare, unusable
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import FusionRule, PreparedRule
from npugraph_ex.fusion.rules._built_in_rule import SIXTEEN_BITS as SIXTEEN_BITS
from npugraph_ex.fusion.rules._built_in_rule import BuiltInRule, Operands
from npugraph_ex.report.passes import off_without


def _records() -> Iterator[BuiltInRule]:
    """The records of this package's modules. A module whose name begins with an underscore is not a rule."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            yield importlib.import_module(f"{__name__}.{module.name}").RULE


RECORDS: Mapping[str, BuiltInRule] = MappingProxyType(
    {record.name: record for record in sorted(_records(), key=lambda one: (not one.default, one.order, one.name))}
)
"""All built-in rules by name, in the order of their trials."""

DEFAULT_RULES: tuple[FusionRule, ...] = tuple(
    rule for record in RECORDS.values() if record.default for rule in record.variants
)
"""The rules that are on by default."""

EXTRA_RULES: tuple[FusionRule, ...] = tuple(
    rule for record in RECORDS.values() if not record.default for rule in record.variants
)
"""The rules that are off by default."""

for _rule in EXTRA_RULES:
    off_without(_rule.name, {"fusion_rules": {_rule.name: True}})

BUILT_IN: frozenset[FusionRule] = frozenset((*DEFAULT_RULES, *EXTRA_RULES))
"""All variants. The traces of their functions depend only on the arguments."""

RULE_NAMES: tuple[str, ...] = tuple(RECORDS)
"""The names of the built-in rules; several variants may have the same name."""


def _has_its_operator(rule: FusionRule) -> bool:
    """Whether the other library's operator that the rule needs is defined now."""
    namespace, _, operator = rule.needs.partition("::")
    return not operator or hasattr(getattr(torch.ops, namespace), operator)


@cache
def _usable(rule: FusionRule) -> PreparedRule:
    """The traced rule; raises (and caches nothing) if an operator is missing, because it may be registered later."""
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
    """Trace the rules again at their next use, because operators were added or removed."""
    _usable.cache_clear()


def is_usable(name: str) -> bool:
    """Whether the operators of the built-in rule are there; where they are not, nothing is logged."""
    try:
        return all(_usable(rule) is not None for rule in filter(_has_its_operator, RECORDS[name].variants))
    except ReplacementError:
        return False


def prepared_rules(*, extra: bool = False, name: str | None = None) -> tuple[PreparedRule, ...]:
    """The default rules, or the extra ones, or those of one name; a rule that cannot be used here is inactive, with a warning."""
    rules = EXTRA_RULES if extra else DEFAULT_RULES
    return tuple(_prepared(rule) for rule in rules if name in {None, rule.name} and _has_its_operator(rule))


def chosen_rules(switches: Mapping[str, bool], graph: fx.Graph) -> Iterator[PreparedRule]:
    """The default rules, and the extra rules that ``switches`` turns on by name, each prepared when it is its turn.

    A rule that has nothing to match in the graph as it is then is given untraced, without a pattern.
    """
    for rule in (*filter(_has_its_operator, DEFAULT_RULES), *(rule for rule in EXTRA_RULES if switches.get(rule.name))):
        yield _prepared(rule) if _may_occur(RECORDS[rule.name].anchors, graph) else unusable(rule, "")


def _may_occur(anchors: Iterable[str], graph: fx.Graph) -> bool:
    """Whether the graph calls one of these operators; true where none is named."""
    packets = [
        getattr(getattr(torch.ops, namespace), name, None)
        for namespace, _, name in (one.partition("::") for one in anchors)
    ]
    overloads = [
        getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()
    ]
    return not anchors or any(graph.find_nodes(op="call_function", target=one, sort=False) for one in overloads)


def operands_of(name: str) -> Operands:
    """What a generator of programs needs to know about the operands of a rule; defaults for a rule that is not built in."""
    return RECORDS[name].operands if name in RECORDS else Operands()


def options_for(name: str | None) -> dict[str, object]:
    """The compile options that switch the rule ``name`` on."""
    record = RECORDS.get(name or "")
    return {} if record is None or record.default else {"fusion_rules": {name: True}}
