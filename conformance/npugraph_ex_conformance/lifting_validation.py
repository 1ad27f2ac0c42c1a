"""`npugraph-ex validate lifting`: random spellings of each form of lifting, and near-misses, judged as a user's rules are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from npugraph_ex.testing.failures.script import script_of
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex.testing.validation.findings import Validation, ValidationFinding, ordered
from npugraph_ex_conformance.examples import joined_parameters
from npugraph_ex_conformance.examples.spellings import MAKERS, checked, drawn, fault_of

ALL = "lifting"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def forms_of(asked: str) -> tuple[str, ...]:
    """The forms that a name stands for; none where it is no form's."""
    known = (*MAKERS, *joined_parameters.FORMS)
    return known if asked == ALL else (asked,) if asked in known else ()


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


class _Tried(NamedTuple):
    """What came of one program; ``case`` makes a script of it, where there is one."""

    fault: str
    near_miss: bool
    lifted: bool
    ulps: tuple[float, float] = (0.0, 0.0)
    case: Case | None = None


def _spelled(form: str, seed: int, dtypes: set[str] | None) -> _Tried | None:
    """Of one spelling; None where its dtype is not asked for."""
    case, spelling = drawn(seed, form)
    if dtypes is not None and case.inputs[0].dtype not in dtypes:
        return None
    outcome = checked(case, spelling)
    lifted = outcome.report is not None and outcome.report.fusions(form) > 0
    fault = fault_of(case, spelling, outcome)
    return _Tried(fault, bool(spelling.near_miss), lifted, (outcome.worst_ulp, outcome.eager_ulp), case)


def _joined(form: str, seed: int, dtypes: set[str] | None) -> _Tried | None:
    """Of one model whose parameters may be joined, in the dtypes in turn; None as above."""
    dtype = _DTYPES[seed % len(_DTYPES)]
    if dtypes is not None and str(dtype).removeprefix("torch.") not in dtypes:
        return None
    one = joined_parameters.joined(form, seed, dtype)
    return _Tried(one.fault, one.near_miss, one.lifted, one.ulps)


def _validated(  # noqa: PLR0917 - the parts of one validation
    form: str, dtypes: set[str] | None, seed: int, examples: int, expected: int, folder: Path, target: str,
    progress: Callable[[float], None],
) -> Validation:  # fmt: skip
    lifted = near_misses = refused = 0
    wrong: list[_Tried] = []
    worst = (0.0, 0.0)
    for number in range(examples):
        one = (_joined if form in joined_parameters.FORMS else _spelled)(form, seed * examples + number, dtypes)
        if one is None:
            continue
        if one.fault:
            wrong.append(one)
        elif one.near_miss:
            near_misses += 1
        elif one.lifted:
            lifted += 1
            worst = max(worst, one.ulps)
        else:
            refused += 1
        progress((number + 1) / examples)
    findings = []
    if wrong:
        first = wrong[0]
        text = f"wrong in {len(wrong)} of {lifted + near_misses + refused + len(wrong)} programs: {first.fault}"
        script = "" if first.case is None else _script(first.case, form, folder)
        findings.append(ValidationFinding("refuted", text, fails=True, script=script))
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
