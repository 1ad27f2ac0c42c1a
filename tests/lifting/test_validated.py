"""`npugraph-ex validate lifting`: each form is proven on random spellings, and what is planted in one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npugraph_ex.lifting import judging
from npugraph_ex.lifting.forms import FORMS, softmax_attention
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex.testing.validation import Validation
from npugraph_ex_conformance.examples import joined_parameters
from npugraph_ex_conformance.examples.spellings import MAKERS, drawn, fault_of
from npugraph_ex_conformance.examples.spellings.spelling import Spelling
from npugraph_ex_conformance.lifting_validation import forms_of, validate_forms


def validated(*forms: str, folder: Path, examples: int, dtypes: Any = None) -> list[Validation]:
    """The results of these forms."""
    results: list[Validation] = []
    validate_forms(
        forms, dtypes=dtypes, seed=0, max_examples=examples, expect_matches=1, report_dir=str(folder), target="this one",
        on_result=results.append, on_progress=lambda *_: None,
    )  # fmt: skip
    return results


def test_each_form_has_spellings() -> None:
    """A new form needs a maker of random spellings, too."""
    assert {form.name for form in FORMS} <= {*MAKERS}
    assert forms_of("lifting") == (*MAKERS, *joined_parameters.FORMS)
    assert forms_of("lift_joined_swiglu") == ("lift_joined_swiglu",)
    assert forms_of("my_fusions") == ()


SELDOM = (
    "lift_add_rms_norm",
    "lift_shared_heads",
    "lift_attention_layout",
    "lift_weight_quant",
    "lift_repeated",
    "lift_bias",
)
"""Forms that the suite's own examples draw seldom or never."""


@pytest.mark.slow
def test_what_another_spelling_is_refused_by_is_no_reading() -> None:
    """A softmax that gives NaN for masked rows is read as wrong; that the right one would save nothing is said beside it."""
    case, spelling = drawn(36, "lift_attention")
    outcome = check(case)
    assert spelling.near_miss
    assert any(" would launch " in miss.reason for miss in outcome.report.near_misses("lift_attention"))  # type: ignore[union-attr]
    assert fault_of(case, spelling, outcome) == ""


@pytest.mark.slow
def test_forms_are_proven(tmp_path: Path) -> None:
    """In few programs each, with symbols for sizes among them; the suite and campaigns have more."""
    results = validated(*SELDOM, folder=tmp_path, examples=6)
    assert [result.rule for result in results] == [*SELDOM]
    assert [str(result) for result in results if not result.ok] == []
    assert all(result.fused and result.programs == 6 for result in results)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_forms_that_join_parameters_are_proven(tmp_path: Path) -> None:
    """In models of each dtype whose weights change between the calls."""
    results = validated(*joined_parameters.FORMS, folder=tmp_path, examples=9)
    assert [str(result) for result in results if not result.ok] == []
    assert all(result.fused and result.programs == 9 for result in results)
    assert all(0 < result.worst_ulp <= 2 * result.eager_ulp for result in results)


@pytest.mark.slow
def test_a_weight_that_is_kept_too_long_is_refuted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nobody looks whether a joined weight has changed, a later call is wrong, and the finding has the model."""
    monkeypatch.setattr("npugraph_ex.frontend.entry.joined_inputs._VERSION", lambda _: 0)
    (result,) = validated("lift_joined_projections", folder=tmp_path, examples=6)
    assert result.verdict == "refuted"
    assert "a result is wrong by" in result.findings[0].text
    assert "def function(x, a" in result.findings[0].text


@pytest.mark.slow
def test_a_lifted_near_miss_is_refuted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A form that takes tensors with gaps is refuted by the program that has them."""
    monkeypatch.setattr("npugraph_ex.lifting.forms.cache_writes.is_dense", lambda _: True)
    (result,) = validated("lift_paged_cache", folder=tmp_path, examples=40)
    assert not result.ok
    assert "lifted, although the gaps is wrong" in result.findings[0].text


@pytest.mark.slow
def test_wrong_values_leave_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nobody looks for writes in between, a result is wrong, and a script shows it."""
    monkeypatch.setattr("npugraph_ex.lifting.engine.checks.undisturbed", lambda *_: None)
    (result,) = validated("lift_add_layer_norm", folder=tmp_path, examples=24)
    assert result.verdict == "refuted"
    assert "elements are wrong" in result.findings[0].text
    assert result.findings[0].script == str(tmp_path / "counterexample_lift_add_layer_norm.py")
    assert "layer_norm" in Path(result.findings[0].script).read_text()


def test_what_stays_for_others_is_no_part_of_the_reference() -> None:
    """The norm computes its own mean: it is not compared with the one that the program keeps, which is rounded to float16."""
    lines = (
        "centred = x0 - x0.mean(-1, keepdim=True)", "variance = centred.pow(2).mean(-1, keepdim=True)",
        "y = (centred * torch.rsqrt(variance + 1e-06)) * x1", "return (y, variance)",
    )  # fmt: skip
    inputs = (Input((4, 3, 24), "float16", seed=87), Input((24,), "float16", seed=88))
    source = "\n    ".join(["def program(x0, x1):", *lines]) + "\n"
    judging.forget()
    outcome = check(Case(source, inputs, sizes=({}, {}), options={"lift": "judged"}))
    assert outcome.report is not None
    (fusion,) = next(rule.fusions for rule in outcome.report.rules if rule.name == "lift_layer_norm")
    assert "sub" in fusion.recomputed
    assert outcome.failures == []


@pytest.mark.slow
def test_one_element_near_zero_makes_no_other_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge refuses queries that are scaled in bfloat16: one result near zero is far, and alone makes the average large."""
    attended = "torch.nn.functional.scaled_dot_product_attention(x0, x1, x2, attn_mask=x3[:, :1], scale=0.3)"
    sizes = ((4, 2, 3, 16), (4, 2, 3, 16), (4, 2, 3, 16), (4, 2, 3, 3))
    inputs = tuple(
        Input(size, "bfloat16", scale=scale, seed=88 + at)
        for at, (size, scale) in enumerate(zip(sizes, (1.0, 0.01, 0.01, 1.0), strict=True))
    )
    source = f"def program(x0, x1, x2, x3):\n    return ({attended},)\n"
    case = Case(source, inputs, sizes=({}, {}), options={"lift": "judged"})
    judging.forget()
    monkeypatch.setattr(softmax_attention, "_power_of_two", lambda scale: scale)
    outcome = check(case)
    (reason,) = outcome.near_misses
    assert "farther from float64" in reason
    assert fault_of(case, Spelling("lift_attention", (attended,), sizes), outcome) == ""
