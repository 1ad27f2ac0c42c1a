"""What the matcher's answers show of a rule: refused everywhere, too permissive, or in conflict with another rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.rules import prepared_rules
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.findings import ValidationFinding
from npugraph_ex.testing.validation.survey import Setting, Surveyed, match_report

_COMPARED = 4


def refused_everywhere(answers: Sequence[Surveyed]) -> ValidationFinding:
    """The finding that the matcher refuses the rule in every setting, with the reason."""
    tried = [entry for entry in answers if entry.answer == "library"]
    if not tried:
        return ValidationFinding(
            "never-matches", f"its search function cannot be traced: {answers[0].reason}", fails=True
        )
    reason, times = Counter(entry.reason for entry in tried).most_common(1)[0]
    example = next(entry.setting for entry in tried if entry.reason == reason)
    return ValidationFinding(
        "never-matches",
        f"the matcher refuses it in all {len(tried)} settings; in {times} of them because {reason} ({example})",
        fails=True,
    )


def refused_for_its_example(own: Surveyed, answers: Sequence[Surveyed]) -> list[ValidationFinding]:
    """The finding that the matcher refuses the rule for its own example inputs, but not for all settings.

    Args:
        own: the answer for the example inputs.
        answers: all others.
    """
    same = [entry for entry in (own, *answers) if entry.setting.dtypes == own.setting.dtypes]
    nowhere = not any(entry.answer in {"fused", "guard"} for entry in same)
    changes = own.answer == "library" and own.allowed and " would " in own.reason
    if not (nowhere or changes):
        return []
    other = next(entry.setting for entry in answers if entry.answer == "fused")
    where = "the dtypes of its own example inputs" if nowhere else "its own example inputs"
    return [
        ValidationFinding(
            "never-for-its-example",
            f"it can never be applied for {where} ({own.setting}): {own.reason}; it is for others, such as {other}",
            fails=True,
            where=", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in own.setting.dtypes))
            if nowhere
            else str(own.setting),
        )
    ]


def allowed_too_much(answers: Sequence[Surveyed]) -> list[ValidationFinding]:
    """The finding that the guard allows matches that would change a dtype, a shape or an alias."""
    legal = [entry for entry in answers if entry.answer == "library" and entry.allowed and " would " in entry.reason]
    if not legal:
        return []
    return [
        ValidationFinding(
            "guard-too-weak",
            f"its guard allows matches that would change what the program returns; this library refuses them: "
            f"{legal[0].reason} ({legal[0].setting})",
        )
    ]


def overlaps(prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting]) -> list[ValidationFinding]:
    """The other rules that fuse operators of the same pattern, and which rule comes first."""
    rules = (*USER_RULES.snapshot(), *prepared_rules())
    order = [rule.rule.name for rule in rules]
    name = prepared.rule.name
    found: dict[str, None] = {}
    for setting in settings[:_COMPARED]:
        report = match_report(pattern, setting, tuple(rule for rule in rules if rule.rule.name != name))
        if not isinstance(report, str):
            found |= dict.fromkeys(record.name for record in report.rules if record.fusions)
    return [overlap(other, comes_first=order.index(name) < order.index(other)) for other in found]


def overlap(other: str, *, comes_first: bool) -> ValidationFinding:
    """The finding that another rule fuses the same operators, and which of the two is tried first."""
    which = "this" if comes_first else "that"
    return ValidationFinding("overlaps-with", f"{other} fuses the same operators; {which} one is tried first and wins")
