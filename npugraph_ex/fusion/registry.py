"""The registry of replacement rules, and ``register_replacement``, the public function for it.

A compilation takes a snapshot of the registry when it starts. Later changes of the registry, in any thread, do not affect it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only
from torch.fx.experimental.symbolic_shapes import guard_or_false
from typing_extensions import Self

from npugraph_ex.errors import ReplacementError, address_of
from npugraph_ex.fusion import dispatch_tracer
from npugraph_ex.fusion.conditions import ConditionFailedError, MatchCheck
from npugraph_ex.fusion.preparing import name_of, prepare
from npugraph_ex.fusion.rule import FusionRule, PreparedRule
from npugraph_ex.fusion.tracing import TraceFn
from npugraph_ex.observe.logger import logger
from npugraph_ex.report.passes import registered_in


@dataclass
class _CountedRule:
    prepared: PreparedRule
    registrations: int = 1


@dataclass(frozen=True)
class Registration:
    """A registered rule; ``remove`` unregisters it. Usable as a context manager for scoped registration."""

    name: str
    _registry: RuleRegistry = field(repr=False)
    key: tuple[object, ...] = field(repr=False)
    _alive: list[bool] = field(default_factory=lambda: [True], repr=False)

    def remove(self) -> None:
        """Unregister. The rule disappears when all its registrations are removed. A second call does nothing."""
        if self._alive.pop() if self._alive else False:
            self._registry.release(self.key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class RuleRegistry:
    """An ordered set of prepared rules."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[tuple[object, ...], _CountedRule] = {}

    def add(self, prepared: PreparedRule) -> Registration:
        """Register a rule. A second registration of the same rewrite is counted, not duplicated."""
        with self._lock:
            entry = self._entries.get(prepared.key)
            if entry is None:
                self._entries[prepared.key] = _CountedRule(prepared)
            else:
                entry.registrations += 1
        return Registration(prepared.rule.name, self, prepared.key)

    def release(self, key: tuple[object, ...]) -> None:
        """Undo one ``add``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return
            entry.registrations -= 1
            if entry.registrations == 0:
                del self._entries[key]

    def drop(self, rules: Collection[PreparedRule]) -> None:
        """Unregister these rules, however often they were registered."""
        with self._lock:
            for rule in rules:
                self._entries.pop(rule.key, None)

    @contextmanager
    def without(self, rules: Collection[PreparedRule]) -> Iterator[None]:
        """Within the block these rules are not registered; afterwards they have their places again."""
        hidden = {rule.key for rule in rules}
        with self._lock:
            before = self._entries
            self._entries = {key: entry for key, entry in before.items() if key not in hidden}
        try:
            yield
        finally:
            with self._lock:
                now = self._entries
                both = {**before, **now}
                self._entries = {key: entry for key, entry in both.items() if key in hidden or key in now}

    def snapshot(self) -> tuple[PreparedRule, ...]:
        """The present rules in the order of registration."""
        with self._lock:
            return tuple(entry.prepared for entry in self._entries.values())


USER_RULES = RuleRegistry()
registered_in(lambda: {prepared.rule.name for prepared in USER_RULES.snapshot()})


@lru_cache(maxsize=256)
def warn_once(rule: str, reason: str) -> None:
    """Log once that ``rule`` cannot be used; the reason may be a whole sentence, or empty."""
    said = reason.rstrip(".")
    text = "Fusion rule %s is not used: %s. What it matches keeps its operators.\n%s"
    logger.warning(text, rule, said, address_of("ReplacementError"))


def _return_true(match: Match) -> bool:  # noqa: ARG001 - an extra_check takes the match
    return True


def _condition_of(extra_check: Callable[[Match], Any]) -> Callable[[Match], str | None]:
    """A user's boolean check as a condition with a reason. ``ShapeRange`` and the like have their own reasons."""
    if isinstance(extra_check, MatchCheck):
        return extra_check.reason_against
    name = getattr(extra_check, "__qualname__", repr(extra_check))

    def condition(match: Match) -> str | None:
        answer = extra_check(match)
        if not isinstance(answer, bool | torch.SymBool):
            code = getattr(inspect.unwrap(extra_check), "__code__", None)
            place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
            forgotten = "; is a `return` missing?" if answer is None else ""
            raise ConditionFailedError(f"extra_check {name} returned {answer!r}, not True or False{forgotten}{place}")
        return None if guard_or_false(answer) else f"extra_check {name} returned False"

    return condition


def _refuse_wrong_kinds(
    search: object, replace: object, trace_fn: object, extra_check: object, pattern: object
) -> None:
    """Raise for an argument that is no function, or for a pattern of a wrong type."""
    functions = {"search_fn": search, "replace_fn": replace, "trace_fn": trace_fn, "extra_check": extra_check}
    for argument, function in functions.items():
        if not callable(function):
            raise ReplacementError(f"register_replacement: {argument} must be a function; it is {function!r}.")
    if pattern is not None and not isinstance(pattern, PatternExpr):
        raise ReplacementError(
            "register_replacement: search_fn_pattern must be a pattern of torch._inductor.pattern_matcher, such as a "
            f"MultiOutputPattern; it is {pattern!r}."
        )


def register_replacement(  # noqa: PLR0913, PLR0917 - the signature is the specification's
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: TraceFn = fwd_only,
    extra_check: Callable[[Match], Any] = _return_true,
    search_fn_pattern: PatternExpr | None = None,
    scalar_workaround: Mapping[str, float] | None = None,
    skip_duplicates: bool = False,  # noqa: ARG001, FBT001, FBT002 - the specification's
) -> Registration:
    """Replace the operators of ``search_fn`` by those of ``replace_fn`` wherever the results stay the same.

    Args:
        search_fn: the computation to look for. Its arguments are wildcards.
        replace_fn: the replacement, with the same arguments and the same number of results.
        example_inputs: a tuple or list of one example for each argument, fake or real; sizes do not matter. If all are on the
            CPU, they count as tensors on the NPU.
        trace_fn: traces both functions; ``fwd_only`` traces for inference.
        extra_check: called with the ``Match`` (``match.kwargs[name]`` is a node, its ``meta["val"]`` a fake tensor);
            True takes the match, False refuses it; ``ShapeRange``, ``LikeExamples`` and several joined by ``&`` also say why. If it
            raises or answers otherwise, the report says so with the match, and the rule is not tried again in that graph.
        search_fn_pattern: a pattern to match in place of ``search_fn``, as ``MultiOutputPattern`` defines it.
        scalar_workaround: numeric arguments of ``search_fn``, each with a value for the trace. They become wildcards and get
            no entry in ``example_inputs``.
        skip_duplicates: accepted for compatibility. A second registration of the same rewrite is never an error.

    Returns:
        A handle; ``handle.remove()``, or the end of ``with handle:``, unregisters the rule.

    Raises:
        ReplacementError: one of the functions or arguments is wrong; the message says which.
    """
    _refuse_wrong_kinds(search_fn, replace_fn, trace_fn, extra_check, search_fn_pattern)
    name = name_of(search_fn)
    if not isinstance(example_inputs, (list, tuple)):
        raise ReplacementError(
            f"{name}: example_inputs must be a tuple or list, one value for each argument of search_fn; "
            f"it is a {type(example_inputs).__name__}."
        )
    if not isinstance(scalar_workaround or {}, Mapping):
        raise ReplacementError(
            f"{name}: scalar_workaround must map argument names to the number that stands for each while tracing; "
            f"it is {scalar_workaround!r}."
        )
    examples = tuple(example_inputs)
    rule = FusionRule(
        name, search_fn, replace_fn, lambda: examples, _condition_of(extra_check), dict(scalar_workaround or {}),
        dispatch_tracer.inference if trace_fn is fwd_only else trace_fn, search_fn_pattern,
    )  # fmt: skip
    prepared = prepare(rule, judge=extra_check)
    for argument in extra_check.arguments if isinstance(extra_check, MatchCheck) else ():
        if argument not in prepared.tensors:
            raise ReplacementError(
                f"{name}: extra_check is about {argument!r}; "
                f"the tensors among the search function's arguments are {sorted(prepared.tensors)}."
            )
    if prepared.inactive:
        warn_once(name, prepared.inactive)
    elif prepared.changes_nothing:
        logger.warning("Fusion rule %s replaces operators by the same ones, so a match changes nothing.", name)
    return USER_RULES.add(prepared)
