"""Tells a replacement that is wrong where arguments have gaps or are turned from one that is wrong for some sizes or dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.validation.trials import Trial, Trials, tried_again

_SAME_VALUES = {"transposed", "strided", "offset", "inside"}
"""Layouts in which an input has the elements that it has in contiguous memory."""
_Inputs = TypeVar("_Inputs", bound=Any)


def to_blame(trials: Trials) -> str:
    """Where the replacement is wrong, and how a guard refuses it; empty where layouts are not what makes it wrong.

    They are if each program in which it is wrong has an input that is not contiguous and is right where all are, in some with the
    same elements: nothing else changes.
    """
    wrong = trials.of("wrong")
    layouts = [{one.layout for one in trial.case.inputs} - {"contiguous"} for trial in wrong]
    found = set().union(*layouts)
    if not all(layouts) or not found & _SAME_VALUES or any(_dense(trial).fate != "right" for trial in wrong):
        return ""
    return (
        f"wrong where an argument is not contiguous ({', '.join(sorted(found))}), right where the same one is; let the "
        "extra_check ask is_contiguous() of it, or call contiguous() in the replacement"
    )


def _dense(trial: Trial) -> Trial:
    """The trial with contiguous inputs, and what comes of it."""
    program = None if trial.program is None else _with_dense_inputs(trial.program)
    return tried_again(replace(trial, case=_with_dense_inputs(trial.case), program=program))


def _with_dense_inputs(of: _Inputs) -> _Inputs:
    return replace(of, inputs=tuple(map(_contiguous, of.inputs)))


def _contiguous(one: Input) -> Input:
    return replace(one, layout="contiguous")
