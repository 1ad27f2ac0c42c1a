"""The breaks of the emulated HCCL's rules fit the present code, so that they can be run; running them takes minutes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from broken_rules import HcclRule, broken, read

import npu_emulator

_RUNTIME = Path(npu_emulator.__file__).parent / "runtime"


@pytest.mark.parametrize("name", read())
def test_each_rule_is_in_the_runtime_once_and_has_a_test(name: str) -> None:
    """Whoever rewrites a rule rewrites its break, too."""
    rule = read()[name]
    source = (_RUNTIME / rule.file).read_text(encoding="utf-8")
    assert broken(rule, source) != source
    file, _, function = rule.test.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_rule_that_is_gone_is_an_error() -> None:
    """Otherwise its test would pass, with nothing broken."""
    rule = HcclRule("collectives.cpp", "no such rule", "", "")
    with pytest.raises(
        ValueError, match=r"collectives.cpp must hold the text of the rule once, and not 0 times: no such rule"
    ):
        broken(rule, "int rule;")
