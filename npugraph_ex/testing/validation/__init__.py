"""Validation of users' replacements: ``validate_replacement`` for one, ``validate_module`` for all of a module.

``survey`` and ``classes`` find where a rule matches, ``alone`` computes it there with nothing around it, ``trials`` runs it in
random programs, ``blame`` tells a wrong replacement from a weak guard, ``validate`` draws the conclusions, and ``findings`` holds
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only

from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.rule_places import RulesNotFoundError
from npugraph_ex.testing.targets import device_name
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.findings import ReplacementRefutedError, Validation, ValidationFinding
from npugraph_ex.testing.validation.loading import load_rules
from npugraph_ex.testing.validation.names import registration_number
from npugraph_ex.testing.validation.registration import registration_code
from npugraph_ex.testing.validation.validate import validate_rule
from npugraph_ex.testing.validation.warnings_once import with_warnings_once

__all__ = [
    "ReplacementRefutedError",
    "RulesNotFoundError",
    "Validation",
    "ValidationFinding",
    "load_rules",
    "validate_module",
    "validate_replacement",
]


@checked
def validate_replacement(  # noqa: PLR0913 - keyword arguments, all but three with defaults
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    extra_check: Callable[[Match], Any] | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    search_fn_pattern: PatternExpr | None = None,
    trace_fn: Callable[..., torch.fx.GraphModule] = fwd_only,
    dtypes: Sequence[torch.dtype] | None = None,
    max_examples: int = 60,
    expect_matches: int = 1,
    seed: int = 0,
    report_dir: str | Path | None = None,
) -> Validation:
    """Find out whether a replacement computes what it replaces, wherever its guard lets it match.

    It is registered for the time of the call, and planted into random programs of other operators, views and in-place
    writes, over dtypes, sizes, layouts and symbolic shapes. Each program runs in eager mode, optimised, and captured
    and replayed, and is judged by a float64 reference. Before that the pattern alone is computed once in every class of
    arguments that decides: these are the same for every seed and every number of programs.

    Args:
        search_fn: as in ``register_replacement``, like the next five.
        replace_fn: what takes its place.
        example_inputs: one tensor for each argument that is not in ``scalar_workaround``.
        extra_check: the guard.
        scalar_workaround: numeric arguments.
        search_fn_pattern: a pattern in place of ``search_fn``.
        trace_fn: traces both functions.
        dtypes: of the floating-point arguments, those that are float32 beside narrower ones aside; None for float16,
            bfloat16 and float32.
        max_examples: how many programs, at least one.
        expect_matches: in how many of them it must be fused.
        seed: the same seed draws the same programs.
        report_dir: where a counterexample is written as a script; None for nowhere.

    Returns:
        The validation. ``print`` it, read its ``verdict``, or ``require()`` that nothing is wrong.

    Raises:
        ReplacementError: it cannot be registered; the message says which function or argument is wrong.
        TypeError: an argument is not of its type.
        ValueError: a number is out of range, or report_dir cannot be written.
    """
    given: dict[str, Any] = {"scalar_workaround": scalar_workaround, "search_fn_pattern": search_fn_pattern}
    if extra_check is not None:
        given["extra_check"] = extra_check
    folder = None if report_dir is None else Path(report_dir)
    setup = registration_code(search_fn, replace_fn, example_inputs, given)
    chosen = None if dtypes is None else tuple(dtypes)
    effort = Effort(max_examples, chosen, seed, expect_matches, folder, setup)
    with register_replacement(search_fn, replace_fn, example_inputs, trace_fn, **given) as registration:
        (prepared,) = (rule for rule in USER_RULES.snapshot() if rule.key == registration.key)
        return with_warnings_once(partial(validate_rule, prepared, effort, target=device_name()))


@checked
def validate_module(  # noqa: PLR0913 - as above
    spec: str,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    max_examples: int = 60,
    expect_matches: int = 1,
    seed: int = 0,
    report_dir: str | Path | None = None,
    on_result: Callable[[Validation], None] | None = None,
    on_progress: Callable[[float, int, str], None] | None = None,
) -> tuple[Validation, ...]:
    """Validate every replacement that a module registers; the arguments are those of ``validate_replacement``.

    Args:
        spec: "module", "module:name" or "path/to/file.py"; see ``load_rules``.
        dtypes: of the floating-point arguments.
        max_examples: how many programs for each replacement.
        expect_matches: in how many of them it must be fused.
        seed: the same seed draws the same programs.
        report_dir: where counterexamples are written; None for nowhere.
        on_result: called with each validation as it is done.
        on_progress: called after each program, with how many replacements are done (a program is a part of one), of how
            many, and the name of the present one.

    Raises:
        RulesNotFoundError: it cannot be imported, or registers nothing.
        ValueError: a number is out of range, or report_dir cannot be written.
    """
    folder = None if report_dir is None else Path(report_dir)
    place = str(Path(spec).resolve()) if spec.partition(":")[0].endswith(".py") else spec
    chosen = None if dtypes is None else tuple(dtypes)
    effort = Effort(max_examples, chosen, seed, expect_matches, folder)
    results: list[Validation] = []
    rules = load_rules(spec)

    def validate_each() -> None:
        for rule in rules:
            one = replace(effort, setup=_loading(place, registration_number(rule, USER_RULES.snapshot())))
            if on_progress is not None:
                reached = partial(_reach, on_progress, len(results), len(rules), rule.rule.name)
                reached(0)
                one = replace(one, after_each=reached)
            results.append(validate_rule(rule, one, target=device_name()))
            if on_result is not None:
                on_result(results[-1])

    with_warnings_once(validate_each)
    return tuple(results)


def _loading(place: str, registration: int) -> str:
    """Lines of a counterexample that register a module's replacements, of those with one name the wrong one alone."""
    alone = f", registration={registration}" if registration else ""
    return f"from npugraph_ex.testing import load_rules\n\nload_rules({place!r}{alone})"


def _reach(on_progress: Callable[[float, int, str], None], done: int, total: int, name: str, share: float) -> None:
    """A replacement is not done before its last program is judged and its result is there."""
    on_progress(done + min(share, 0.99), total, name)
