"""The table of rules in the documentation is what the rule modules say of themselves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from npugraph_ex.fusion.rules import DEFAULT_RULES, EXTRA_RULES

PAGE = Path(__file__).parent.parent.parent / "docs" / "fusion.md"


def test_the_table_of_rules_is_complete_and_true() -> None:
    """Name, first sentence of the module, and whether it is on by default, in the order in which rules are tried."""
    rows = {}
    for kind, rules in (("default", DEFAULT_RULES), ("extra", EXTRA_RULES)):
        for rule in rules:
            summary = str(sys.modules[rule.search.__module__].__doc__).splitlines()[0].replace("``", "`")
            summary = re.sub(r" An extra rule(, off unless switched on)?\.$", "", summary)
            rows[rule.name] = f"| `{rule.name}` | {summary} | {kind} |"
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert table == list(rows.values())
