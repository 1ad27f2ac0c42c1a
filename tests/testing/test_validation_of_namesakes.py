"""Two replacements of one search function have one name: each is validated without the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import register_replacement
from npugraph_ex.fusion.registry import USER_RULES, RuleRegistry
from npugraph_ex.testing.validation import validate_module
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.validate import validate_rule


def product(x: Any, y: Any) -> Any:
    """What both replace."""
    return torch.sigmoid(x) * y


def right(x: Any, y: Any) -> Any:
    """The same in other operators."""
    return y * torch.sigmoid(x)


def wrong(x: Any, y: Any) -> Any:
    """Another function."""
    return torch.sigmoid(x) * x


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_the_second_is_not_proven_by_the_first() -> None:
    """The first would take every match. Each of the two findings says which one wins, and both are registered afterwards."""
    with FakeTensorMode():
        examples = [torch.empty(4, 8, device="npu") for _ in range(2)]
    with (
        register_replacement(product, right, examples) as first,
        register_replacement(product, wrong, examples) as second,
    ):
        before = USER_RULES.snapshot()
        effort = Effort(6, (torch.float32,))
        kept, refuted = (
            validate_rule(next(rule for rule in before if rule.key == one.key), effort) for one in (first, second)
        )
        assert USER_RULES.snapshot() == before
    assert (kept.verdict, refuted.verdict) == ("proven on 6, overlaps-with", "refuted, overlaps-with")
    assert "this one is tried first" in str(kept)
    assert "that one is tried first" in str(refuted)


MODULE = """
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import register_replacement

def product(x, y):
    return torch.sigmoid(x) * y

with FakeTensorMode():
    examples = [torch.empty(4, 8, device="npu") for _ in range(2)]
for _name, replacement in [("right", lambda x, y: y * torch.sigmoid(x)), ("wrong", lambda x, y: torch.sigmoid(x) * x)]:
    register_replacement(product, replacement, examples)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_wrong_one_has_a_file_of_its_own(tmp_path: Path) -> None:
    """Rows and files say which registration they are about. The script runs that one alone, which another one would hide."""
    source = tmp_path / "of_one_name.py"
    source.write_text(MODULE, encoding="utf-8")
    before = USER_RULES.snapshot()
    try:
        results = validate_module(str(source), dtypes=[torch.float32], max_examples=2, report_dir=tmp_path / "found")
    finally:
        USER_RULES.drop([rule for rule in USER_RULES.snapshot() if rule not in before])
        sys.modules.pop("of_one_name")
    assert [result.rule for result in results] == [f"of_one_name.product (registration {n})" for n in (1, 2)]
    assert [result.ok for result in results] == [True, False]
    assert "of_one_name.product (registration 1) fuses the same operators; that one is tried first" in str(results[1])
    script = results[1].findings[0].script
    assert script == str(tmp_path / "found" / "counterexample_of_one_name_product-2.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (ran.returncode, "elements are wrong" in ran.stdout) == (1, True), ran.stdout + ran.stderr


def test_rules_are_hidden_for_a_block() -> None:
    """What is registered or removed within stays so, and the order is as before."""
    with FakeTensorMode():
        examples = [torch.empty(4, 8, device="npu") for _ in range(2)]
    with register_replacement(product, right, examples), register_replacement(product, wrong, examples):
        one, other = USER_RULES.snapshot()[-2:]
    registry = RuleRegistry()
    first, _ = registry.add(one), registry.add(other)
    with registry.without([other]):
        assert registry.snapshot() == (one,)
        first.remove()
    assert registry.snapshot() == (other,)
    again = registry.add(one)
    with registry.without([other]):
        pass
    assert registry.snapshot() == (other, one)
    again.remove()
