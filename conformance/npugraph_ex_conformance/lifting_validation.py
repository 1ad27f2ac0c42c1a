"""`npugraph-ex validate lifting`: random spellings of each form of lifting, and near-misses, judged as a user's rules are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from npugraph_ex.errors import UsageError
from npugraph_ex.lifting import judging
from npugraph_ex.testing.failures.script import script_of
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex.testing.validation.findings import Validation, ValidationFinding, ordered
from npugraph_ex_conformance.examples.spellings import MAKERS, drawn, fault_of

ALL = "lifting"
_WITH_PARAMETERS = ("lift_joined_swiglu", "lift_joined_geglu", "lift_joined_projections")


def forms_of(asked: str) -> tuple[str, ...]:
    """The forms that a name stands for; none where it is no form's.

    Raises:
        UsageError: it is a form of which no spellings are drawn.
    """
    if asked in _WITH_PARAMETERS:
        raise UsageError(f"{asked} joins parameters of a model, of which no random programs are drawn")
    return tuple(MAKERS) if asked == ALL else (asked,) if asked in MAKERS else ()


def validate_forms(
    forms: Sequence[str], *, dtypes: Sequence[torch.dtype] | None, seed: int, max_examples: int, expect_matches: int,
    report_dir: str, target: str, on_result: Callable[[Validation], None], on_progress: Callable[[float, int, str], None],
) -> None:  # fmt: skip
    """Validate forms of lifting one after another.

    Args:
        forms: their names.
        dtypes: of the first input; None for all.
        seed: of the programs.
        max_examples: programs of each form, near-misses included.
        expect_matches: in how many of them it must be lifted at least.
        report_dir: where counterexamples are written.
        target: the device, in words.
        on_result: receives each result.
        on_progress: receives how many forms are done, a part of one too, of how many, and the name.
    """
    names = None if dtypes is None else {str(dtype).removeprefix("torch.") for dtype in dtypes}
    for number, form in enumerate(forms):
        on_result(
            _validated(
                form, names, seed, max_examples, expect_matches, Path(report_dir), target,
                lambda part, at=number, name=form: on_progress(at + part, len(forms), name),  # type: ignore[misc]
            )
        )  # fmt: skip


def _validated(  # noqa: PLR0917 - the parts of one validation
    form: str, dtypes: set[str] | None, seed: int, examples: int, expected: int, folder: Path, target: str,
    progress: Callable[[float], None],
) -> Validation:  # fmt: skip
    lifted = near_misses = refused = 0
    wrong: list[tuple[Case, str]] = []
    worst = (0.0, 0.0)
    for number in range(examples):
        case, spelling = drawn(seed * examples + number, form)
        if dtypes is not None and case.inputs[0].dtype not in dtypes:
            continue
        judging.forget()
        outcome = check(case)
        fault = fault_of(case, spelling, outcome)
        fused = outcome.report is not None and outcome.report.fusions(form) > 0
        if fault:
            wrong.append((case, fault))
        elif spelling.near_miss:
            near_misses += 1
        elif fused:
            lifted += 1
            worst = max(worst, (outcome.worst_ulp, outcome.eager_ulp))
        else:
            refused += 1
        progress((number + 1) / examples)
    findings = []
    if wrong:
        case, fault = wrong[0]
        text = f"wrong in {len(wrong)} of {lifted + near_misses + refused + len(wrong)} programs: {fault}"
        findings.append(ValidationFinding("refuted", text, fails=True, script=_script(case, form, folder)))
    elif lifted < expected:
        findings.append(
            ValidationFinding(
                "never-matches",
                f"lifted in {lifted} of {examples} programs; expected in at least {expected}",
                fails=True,
            )
        )
    else:
        text = (
            f"lifted in {lifted} random spellings; left alone in {near_misses} near-misses, and in {refused} spellings that the "
            "judge refused or that are written to on the way"
        )
        findings.append(ValidationFinding("proven", text))
    return Validation(
        rule=form, findings=ordered(findings), programs=lifted + near_misses + refused + len(wrong), fused=lifted,
        wrong=len(wrong), worst_ulp=worst[0], eager_ulp=worst[1], target=target, seed=seed,
    )  # fmt: skip


def _script(case: Case, form: str, folder: Path) -> str:
    """The script that shows wrong values; none where a near-miss was lifted, or a spelling missed: the finding has its source."""
    outcome = check(case)
    if outcome.ok:
        return ""
    path = folder / f"counterexample_{form}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script_of(case, outcome, guilty=f"the form {form}"), encoding="utf-8")
    return str(path)
