"""All rules, the kind of items that asks them one by one, and the file of a device's answers. Imports nothing of torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind

if TYPE_CHECKING:
    from npugraph_ex_conformance.fidelity.rule import DeviceRule

HEADERS = ("rule", "what it says", "source")


def all_rules() -> tuple[DeviceRule, ...]:
    """Every rule, in order; their list needs no device.

    Raises:
        ValueError: two have one name.
    """
    from npugraph_ex_conformance.fidelity import captures, memory, others, streams

    found = tuple(rule for part in (captures, streams, memory, others) for rule in part.rules())
    if len({rule.name for rule in found}) < len(found):
        raise ValueError("two rules have one name")
    return found


def _opened(_settings: CampaignSettings) -> Callable[[int], ItemAnswer]:
    rules = all_rules()

    def ask(number: int) -> ItemAnswer:
        rule = rules[number]
        try:
            answer = json.loads(json.dumps(rule.probe()))
        except Exception as error:  # noqa: BLE001 - a device may refuse what the probe does not expect to be refused
            answer = f"{type(error).__name__}: {str(error)[:300]}"
        wrong = "" if answer == rule.answer else f"answers {answer!r}; the rule says {rule.answer!r}"
        return ItemAnswer(wrong, label=rule.name, value=answer)

    return ask


FIDELITY = ItemKind("fidelity", "the rules of the emulated device", _opened, size=lambda _: len(all_rules()))


def read(file: Path) -> Mapping[str, Any]:
    """The answers of a device, by rule.

    Raises:
        UsageError: the file is none of ours.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(file)!r} is no file of `npugraph-ex fidelity`: {error}") from error
    answers = found.get("answers") if isinstance(found, dict) else None
    if not isinstance(answers, dict):
        raise UsageError(f'{str(file)!r} is no file of `npugraph-ex fidelity`: it has no object "answers"')
    return answers


def markdown_rows() -> Iterator[str]:
    """The table of a page, and a line that counts the sources."""
    rules = all_rules()
    assumed = sum(rule.is_assumed for rule in rules)
    yield f"{len(rules)} rules; {assumed} of them are only assumed."
    yield ""
    yield f"| {' | '.join(HEADERS)} |"
    yield "|---|---|---|"
    for rule in rules:
        yield f"| `{rule.name}` | {rule.says} | {rule.source} |"
