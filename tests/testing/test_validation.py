"""Validation of users' replacements: each verdict on a replacement that deserves it, and what the documentation shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_rules import example, product_then_sigmoid, the_same_turned, validated

from npugraph_ex.fusion import attempt
from npugraph_ex.fusion.conditions import LikeExamples
from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing import ReplacementRefutedError, Validation, ValidationFinding
from npugraph_ex.testing.generator.patterns import pattern_of
from npugraph_ex.testing.validation.broadcasting import broadcasting
from npugraph_ex.testing.validation.survey import Setting, example_setting
from npugraph_ex.testing.validation.trials import run_trials


@pytest.mark.slow
def test_a_right_replacement_is_proven() -> None:
    """It fuses in the programs and no judge objects; other dtypes are not tried when one is asked for."""
    result = validated(product_then_sigmoid, the_same_turned, dtypes=[torch.bfloat16], max_examples=8)
    assert result.verdict == f"proven on {result.fused}", str(result)
    assert result.fused >= 4
    assert result.pattern == "aten.mul.Tensor -> aten.sigmoid"
    result.require()


@pytest.fixture(scope="module")
def refuted(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    """The validation of a replacement that is wrong everywhere."""

    # Inside, so that the script holds its text: the tests are no package that another process could import.
    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.mul(x, y))

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.add(x, y))

    folder = tmp_path_factory.mktemp("refuted")
    return validated(search, replace, max_examples=6, dtypes=[torch.float16], report_dir=folder)


@pytest.mark.slow
def test_a_wrong_one_is_refuted_by_a_script_that_runs(refuted: Validation) -> None:
    """The counterexample is small, and exits 1 under plain python in another process."""
    assert refuted.verdict == "refuted", str(refuted)
    with pytest.raises(ReplacementRefutedError, match="elements are wrong"):
        refuted.require()
    script = Path(refuted.findings[0].script)
    assert script.parent.name.startswith("refuted")
    assert len(script.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout


@pytest.mark.slow
def test_programs_that_keep_a_rule_away_are_not_taken_for_never() -> None:
    """The first programs through `torch.compile` have a transposed input, which the rule refuses; later ones fuse."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_swiglu.default(x)

    result = validated(gated, fused, example(2, 64), max_examples=4)
    assert result.verdict.startswith("proven on "), str(result)
    assert result.ok


BOUNDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "one off in the replacement": (
        lambda x: torch.clamp(torch.round(x), -128.0, 127.0) * 2,
        lambda x: torch.round(torch.clamp(x, -127.0, 127.0)) * 2,
    ),
    "named by the replacement alone": (lambda x: torch.relu(x) * 2, lambda x: torch.clamp(x, 0, 6.0) * 2),
}


@pytest.mark.parametrize("what", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_wrong_bound_is_seen_in_the_first_program(what: str, dtype: torch.dtype) -> None:
    """Random values hardly reach it; the pattern or its replacement names it, so inputs lie there."""
    search, replace = BOUNDS[what]
    with register_replacement(search, replace, [example(4, 64)]) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        setting = Setting(((4, 64),), (dtype,))
        trials = run_trials(pattern_of(prepared.rule), [setting], examples=1, seed="0", options={})
    assert [trial.fate for trial in trials.made] == ["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "replace", "said"),
    [
        (lambda x: torch.relu(x) + 0.0 * x, lambda x: torch.relu(x), ", the reference nan"),  # noqa: PLW0108 - it is traced
        (
            lambda x: x.masked_fill(x < 0, 0.0).sum(-1),
            lambda x: (x * (x >= 0).to(x.dtype)).sum(-1),
            " is nan, the reference ",
        ),
    ],
    ids=["a NaN is lost", "a NaN is made"],
)
def test_what_infinite_inputs_alone_show_is_told_and_does_not_fail(
    search: Callable[..., Any], replace: Callable[..., Any], said: str
) -> None:
    """Zero times infinity is NaN; for finite inputs the replacement computes the same. A row with both infinities has no sum."""
    result = validated(search, replace, example(4, 8), dtypes=[torch.float16], max_examples=3)
    assert result.verdict == "proven on 3, differs-for-inf-or-nan", str(result)
    assert said in result.findings[1].text
    result.require()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "replace", "remark"),
    [
        (lambda x: torch.relu(torch.neg(x)), lambda x: torch.neg(torch.clamp(x, max=0.0)), True),
        (lambda x: torch.relu(torch.neg(x)), lambda x: torch.relu(x * -1.0), False),
    ],
    ids=["zeros are negative", "zeros are the same"],
)
def test_another_sign_of_zero_is_told_and_does_not_fail(
    search: Callable[..., Any], replace: Callable[..., Any], remark: bool
) -> None:
    """Zeros are equal whatever their sign, and yet a program that divides by them tells them apart."""
    result = validated(search, replace, example(4, 8), dtypes=[torch.float16], max_examples=3)
    assert result.verdict == "proven on 3" + (", differs-in-sign-of-zero" if remark else ""), str(result)
    result.require()


@pytest.mark.slow
def test_zeros_of_both_signs_meet() -> None:
    """Which of two equal numbers is taken shows in the sign alone, where one operand has +0 and the other one -0."""
    search, replace = (lambda x, y: torch.where(x > y, x, y)), (lambda x, y: torch.where(x >= y, x, y))
    result = validated(search, replace, example(4, 8), example(4, 8), dtypes=[torch.float16], max_examples=3)
    assert result.verdict == "proven on 3, differs-in-sign-of-zero", str(result)


def sum_and_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A pattern whose sum broadcasts."""
    total = x + r
    return torch.nn.functional.layer_norm(total, (w.shape[0],), w, b, 1e-5), total


def fused_sum_and_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same for operands of one shape; the operator takes no others."""
    y, _, _, total = torch.ops.npu.npu_add_layer_norm(x, r, w, b, 1e-5, True)
    return y, total


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_operands_that_broadcast_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is added to each row is refused by the operator, of whose record the optimiser does not know it here.

    The finding names the shapes and a check, with which none fuses.
    """
    monkeypatch.setattr(attempt, "unlike_operands", lambda _: None)
    examples = (example(4, 8), example(4, 8), example(8), example(8))
    result = validated(sum_and_norm, fused_sum_and_norm, *examples, max_examples=2, dtypes=[torch.float16])
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert re.match(r"wrong where the argument that broadcasts is r of shape .*, right where it is none;", said), said
    assert "r of shape [1, " in said
    assert "LikeExamples(x=..., r=..., w=..., b=...)" in said
    assert "raised" in said
    check = LikeExamples(**dict(zip("xrwb", examples, strict=True)))
    with register_replacement(sum_and_norm, fused_sum_and_norm, examples, extra_check=check) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        pattern = pattern_of(prepared.rule)
        assert not broadcasting(prepared, pattern, [example_setting(pattern)])


@pytest.mark.slow
def test_the_table_counts_as_the_findings_do(refuted: Validation) -> None:
    """Fused, right and wrong programs add up in both, and the worst distance is no smaller than what the finding tells."""
    (finding,) = [finding for finding in refuted.findings if finding.kind == "refuted"]
    told = re.search(r"(\d+) of (\d+) programs .*: ([\d.e+]+) ulp", finding.text)
    assert told, finding.text
    assert (refuted.wrong, refuted.fused + refuted.wrong) == (int(told[1]), int(told[2]))
    assert refuted.fused + refuted.wrong <= refuted.programs == 6
    assert refuted.worst_ulp >= float(told[3]) * 0.999 > 1
    row = re.split("  +", str(refuted).splitlines()[2])
    counts = [f"{refuted.fused + refuted.wrong} of 6", f"{refuted.fused} of {refuted.fused + refuted.wrong}"]
    assert row[2:4] == counts
    assert [float(row[4]), float(row[5])] == pytest.approx([refuted.worst_ulp, refuted.eager_ulp], rel=0.01, abs=0.005)
    assert 0 < refuted.settings["run"] <= refuted.settings["fused"]
    assert f"{refuted.settings['fused']} fused, {refuted.settings['run']} of them run" in row[6]


@pytest.mark.parametrize(("counts", "shown"), [({"wrong": 2}, "see below"), ({"fused": 2}, "equal")])
def test_what_has_no_distance_is_not_called_equal(counts: dict[str, int], shown: str) -> None:
    """Wrong integers are no ulps off: the table refers to the finding."""
    row = str(
        Validation("a rule", (ValidationFinding("proven", ""),), programs=2, **counts, settings={"fused": 1})
    ).splitlines()[2]
    assert re.split("  +", row)[4] == shown


@pytest.mark.slow
def test_a_replacement_of_another_dtype_never_matches() -> None:
    """The library refuses it everywhere, and the reason is told."""
    result = validated(product_then_sigmoid, lambda x, y: torch.sigmoid(torch.mul(x, y)).double(), max_examples=3)
    assert result.verdict == "never-matches"
    assert "would have dtype torch.float64" in result.findings[0].text


@pytest.mark.slow
def test_what_is_finite_nowhere_is_not_judged_and_says_so() -> None:
    """The root of a negative number is NaN in every program, so that no right program and no wrong one is left."""
    result = validated(lambda x: torch.sqrt(-x * x - 1), lambda x: x * 0 + 1, example(2, 64), max_examples=3)
    assert result.verdict == "not-judged"
    assert "computes infinities or NaN" in result.findings[0].text
    assert "the reference nan" in result.findings[0].text


@pytest.mark.slow
def test_what_runs_nowhere_shows_the_error_of_the_operator() -> None:
    """The examples do not fit the operator, in no size: the user sees its own words."""

    def search(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.ops.npu.npu_rms_norm(x, weight)[0])

    result = validated(search, lambda x, w: search(x, w) * 1, example(2, 64), example(2, 3, 64), max_examples=3)
    assert result.verdict == "not-judged"
    assert "in eager mode it raised" in result.findings[0].text
    assert "gamma" in result.findings[0].text


OTHERWISE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dtype": (lambda x: x.float(), "would have dtype torch.float32"),
    "device": (lambda x: x.cpu(), "would have device cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "dtypes"), [("dtype", None), ("device", None), ("dtype", [torch.float32])],
    ids=["a dtype", "a device", "another dtype is asked for"],
)  # fmt: skip
def test_what_never_fuses_for_its_own_example_is_not_proven(what: str, dtypes: list[torch.dtype] | None) -> None:
    """It is right for float32, and the library refuses it for float16, which its example has: that is no success."""
    change, reason = OTHERWISE[what]

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.sigmoid(torch.mul(y, x))
        return change(result) if x.dtype == torch.float16 else result

    examples = (example(4, 64), example(4, 64))
    result = validated(product_then_sigmoid, replace, *examples, max_examples=3, dtypes=dtypes)
    assert result.verdict.startswith("never-for-its-example (float16), proven on"), str(result)
    assert not result.ok
    assert reason in result.findings[0].text
    assert "(float16[4, 64], float16[4, 64])" in result.findings[0].text


@pytest.mark.slow
def test_an_example_that_alone_is_refused_is_named() -> None:
    """Other sizes of the same dtype fuse; the author's own do not."""

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.sigmoid(torch.mul(y, x))
        return result.float() if x.shape == (4, 64) else result

    examples = (example(4, 64), example(4, 64))
    result = validated(product_then_sigmoid, replace, *examples, max_examples=3, dtypes=[torch.float16])
    assert result.verdict.startswith("never-for-its-example (float16[4, 64], float16[4, 64]), "), str(result)
    assert "for its own example inputs (float16[4, 64]" in result.findings[0].text
    assert not result.ok


@pytest.mark.slow
def test_too_few_matches_fail() -> None:
    """More fusions than there are programs cannot be had."""
    result = validated(product_then_sigmoid, the_same_turned, max_examples=3, expect_matches=4, dtypes=[torch.float16])
    assert result.verdict == "never-matches"
    assert "expected in at least 4" in result.findings[0].text


@pytest.mark.slow
def test_what_misses_its_own_search_function_is_not_proven() -> None:
    """Random programs are made of the trace's operators, where it fuses; of the function itself Dynamo makes others."""

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(torch.add(x, y) if torch.compiler.is_dynamo_compiling() else torch.mul(x, y))

    result = validated(search, the_same_turned, max_examples=4, dtypes=[torch.float16])
    assert result.verdict == "never-matches", str(result)
    assert "not in its own search function through torch.compile" in result.findings[0].text


@pytest.mark.slow
def test_an_overlap_with_a_default_rule_is_told() -> None:
    """Two rules after the same operators: both are named, and who wins."""

    def search(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, _, total = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma)
        return (*torch.ops.npu.npu_dynamic_quant(y), total)

    def replace(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantised, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma)
        return quantised, scale, total

    examples = (example(4, 64), example(4, 64), example(64))
    result = validated(search, replace, *examples, max_examples=4, dtypes=[torch.float16])
    (finding,) = [finding for finding in result.findings if finding.kind == "overlaps-with"]
    assert finding.text.startswith("add_rms_norm_dynamic_quant ")
    assert result.ok, str(result)


def test_errors_come_early() -> None:
    """A number out of range, a folder that is a file, and a function that is none are refused before anything runs."""
    with pytest.raises(ValueError, match="report_dir must be a folder"):
        validated(product_then_sigmoid, the_same_turned, report_dir=Path(__file__) / "below")
    with pytest.raises(ValueError, match=r"max_examples .* 0"):
        validated(product_then_sigmoid, the_same_turned, max_examples=0)
    with pytest.raises(TypeError, match=r"replace_fn=...\) must be .* 3"):
        validated(product_then_sigmoid, 3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_sizes_that_a_replacement_does_not_take_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """That it is not used there is an answer of the survey, not a message for each size."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return x[..., -1].relu()

    def replace(x: torch.Tensor) -> torch.Tensor:
        return x.select(-1, 63).clamp_min(0)

    result = validated(search, replace, example(4, 64), max_examples=3, dtypes=[torch.float16])
    assert result.settings["library"] > 0, result.settings
    assert not [record for record in caplog.records if "is not used" in record.getMessage()]
