"""A fusion rule: its search, its replacement and its condition. Not how it is matched.

``FusionRule`` is the declaration, one small frozen object. ``preparing.prepare`` makes a ``PreparedRule`` of it, which
holds no state of any compile, so that many compiles may share it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._inductor.pattern_matcher import Match, PatternExpr
from torch.utils import _pytree as pytree

from npugraph_ex.fusion import dispatch_tracer, tracing

Condition = Callable[[Match], str | None]


def always(match: Match) -> str | None:  # noqa: ARG001 - a condition takes the match
    """The condition of a rule without conditions."""
    return None


@dataclass(frozen=True, eq=False)
class FusionRule:
    """One declared rewrite.

    Attributes:
        name: appears in the report.
        search: the function whose traced operators the rule searches. Its arguments are wildcards.
        replace: the function whose traced operators replace them; same arguments, same number of results.
        example_inputs: makes one example for each argument that is not in ``scalars``, under a fake mode.
        condition: returns None to allow a match, otherwise the reason against it.
        scalars: numbers that are wildcards too, each with a value for the trace that no operator has as a default.
        trace_fn: as in ``torch._inductor.pattern_matcher``.
        pattern: matched instead of the traced ``search``.
        free_strides: results may have other strides than before if no program can see that, see ``free_strides``.
        not_in_modes: the values of the option ``mode`` in which the rule does not apply.
        needs: another library's operator, ``namespace::name``; where it is not defined, the rule is silently left out.
    """

    name: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    example_inputs: Callable[[], Sequence[Any]]
    condition: Condition = always
    scalars: Mapping[str, float] = field(default_factory=dict)
    trace_fn: tracing.TraceFn = dispatch_tracer.forward
    pattern: PatternExpr | None = None
    free_strides: bool = False
    not_in_modes: tuple[str, ...] = ()
    needs: str = ""

    @property
    def source(self) -> str:
        """``file:line`` of a search function that is local to another, whose name is long; empty for others."""
        code = getattr(inspect.unwrap(self.search), "__code__", None) if "<locals>" in self.name else None
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


@dataclass(frozen=True)
class PreparedRule:
    """A rule ready to be matched against any number of graphs.

    Attributes:
        rule: the declaration.
        arguments: the search function's argument names.
        flat_arguments: for each argument, the names of its tensors and numbers: one, or several for a list.
        specs: for each argument, the structure of its flat values.
        tensors: the flat names of tensors.
        with_gradient: the tensors whose examples require a gradient.
        training: whether the pattern contains a backward, so that only a joint graph can match.
        outputs: the positions of the results that a match replaces, see ``tracing.matched_outputs``.
        pattern: the loose pattern; None when the rule is inactive.
        inactive: the reason why the rule cannot be used here, for example a missing operator.
        key: equal for two registrations of the same rewrite.
        saves: how many kernels a fusion saves, on the example inputs; negative where it costs some.
        changes_nothing: whether the replacement computes the operators of the search function once more.
    """

    rule: FusionRule
    arguments: tuple[str, ...]
    flat_arguments: tuple[tuple[str, ...], ...]
    specs: tuple[Any, ...]
    tensors: frozenset[str]
    with_gradient: frozenset[str]
    training: bool
    outputs: tuple[int, ...]
    pattern: PatternExpr | None
    inactive: str
    key: tuple[object, ...]
    saves: int = 0
    changes_nothing: bool = False

    @property
    def flat_names(self) -> list[str]:
        """The names of all wildcards, in order."""
        return [name for names in self.flat_arguments for name in names]

    def structured(self, bound: Mapping[str, Any]) -> list[Any]:
        """One value for each argument, from the flat values of a match."""
        return [
            pytree.tree_unflatten([bound[name] for name in names], spec)
            for names, spec in zip(self.flat_arguments, self.specs, strict=True)
        ]
