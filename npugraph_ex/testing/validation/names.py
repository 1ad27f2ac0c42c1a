"""What a report calls a replacement, and its file: several may have one name."""

from __future__ import annotations

from collections.abc import Sequence

from npugraph_ex.fusion.rule import PreparedRule


def registration_number(prepared: PreparedRule, rules: Sequence[PreparedRule]) -> int:
    """Which one of several replacements of one name this is, from 1 in the order of registration; 0 if no other has its name."""
    keys = [rule.key for rule in rules if rule.rule.name == prepared.rule.name]
    return keys.index(prepared.key) + 1 if len(keys) > 1 else 0


def label_of(prepared: PreparedRule, rules: Sequence[PreparedRule]) -> str:
    """The name in a report; with its number where several have it."""
    number = registration_number(prepared, rules)
    return f"{prepared.rule.name} (registration {number})" if number else prepared.rule.name


def file_name_of(prepared: PreparedRule, rules: Sequence[PreparedRule]) -> str:
    """The name of the counterexample, without the suffix: no two replacements that are registered have the same."""
    same = [rule.key for rule in rules if _as_file(rule.rule.name) == _as_file(prepared.rule.name)]
    number = "" if len(same) == 1 else f"-{same.index(prepared.key) + 1}"
    return f"counterexample_{_as_file(prepared.rule.name)}{number}"


def _as_file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")
