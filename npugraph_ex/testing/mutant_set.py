"""The mutants, as data. Each breaks one thing that a promise of the library rests on; the suite must kill every one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from npugraph_ex.testing.mutation import Mutant


def _answering(answer: Any) -> Callable[[Any], Any]:
    """Replace a function by one that always answers the same."""

    def replacement(original: Any) -> Any:
        del original
        return lambda *_args, **_kwargs: answer

    return replacement


def _replacing(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change what one built-in rule puts in place of a match; ``change`` gets and gives a replacement function."""

    def changed(prepared: Any) -> Any:
        if prepared.rule.name != "add_rms_norm_dynamic_quant":
            return prepared
        return dataclasses.replace(
            prepared, rule=dataclasses.replace(prepared.rule, replace=change(prepared.rule.replace))
        )

    def replacement(original: Callable[..., tuple[Any, ...]]) -> Any:
        return lambda *args, **kwargs: tuple(map(changed, original(*args, **kwargs)))

    return replacement


def _without_smoothing(replace: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        if len(args) != 5:
            return replace(*args)
        x1, x2, gamma, _, epsilon = args
        results = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=epsilon)
        return results[0], results[3], results[2]

    return _like(replace, wrong)


def _without_epsilon(replace: Callable[..., Any]) -> Callable[..., Any]:
    return _like(replace, lambda *args: replace(*args[:-1], 0.0))


def _wrong_residual(replace: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        quantised, scale, _ = replace(*args)
        return quantised, scale, torch.sub(args[0], args[1])

    return _like(replace, wrong)


def _like(right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
    """``wrong`` with the name and the parameters of ``right``, which are looked at."""
    wrong.__qualname__ = right.__qualname__
    wrong.__wrapped__ = right  # type: ignore[attr-defined]
    return wrong


def _constants_match(original: Callable[..., Any]) -> Callable[..., Any]:
    def matches(pattern: Any, value: Any, ctx: Any, match: Any) -> Any:
        failed = original(pattern, value, ctx, match)
        return None if failed is not None and failed.format_string == "differs" else failed

    return matches


def _only_ends_have_effects(original: Any) -> Any:
    del original
    return lambda node: node.op in {"placeholder", "output"}


def _skipping_first(original: Any) -> Any:
    def replay(self: Any, inputs: Any) -> None:
        buffers, self._buffers = self._buffers, self._buffers[1:]
        try:
            original(self, inputs)
        finally:
            self._buffers = buffers

    return replay


_ENGINE = "npugraph_ex.fusion.engine"
_CHECKS = "npugraph_ex.fusion.checks"
_MEMORY = "npugraph_ex.passes.memory:MemoryMap"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "fusion-drops-smooth-scales", "the fused operator gets every argument of the pair that it replaces",
        f"{_ENGINE}:chosen_rules", _replacing(_without_smoothing), "planted",
    ),
    Mutant(
        "fusion-drops-epsilon", "the fused operator gets the norm's epsilon",
        f"{_ENGINE}:chosen_rules", _replacing(_without_epsilon), "planted",
    ),
    Mutant(
        "fusion-wrong-residual", "each result takes the place of the one that it equals",
        f"{_ENGINE}:chosen_rules", _replacing(_wrong_residual), "planted",
    ),
    Mutant(
        "matcher-ignores-keywords", "an argument that the pattern does not name must have its default value",
        "npugraph_ex.fusion.pattern:_match_value", _constants_match, "near-miss",
    ),
    Mutant(
        "fusion-ignores-other-users", "no value that vanishes has a user outside the match",
        f"{_CHECKS}:vanishing_values", _answering(None), "near-miss",
    ),
    Mutant(
        "fusion-ignores-writes-between", "nothing writes a matched value between the matched operators",
        f"{_CHECKS}:undisturbed", _answering(None), "near-miss",
    ),
    Mutant(
        "fusion-never-matches", "what must fuse does fuse",
        f"{_ENGINE}:may_match", _answering(answer=False), "planted",
    ),
    Mutant(
        "dead-code-drops-writes", "a write to memory is never dead code",
        "npugraph_ex.passes.dead_code:has_effect", _only_ends_have_effects, "integers",
    ),
    Mutant(
        "reinplace-ignores-later-reads", "memory that is read later is not overwritten",
        f"{_MEMORY}.reads_after", lambda _original: lambda *_args: iter(()), "integers",
    ),
    Mutant(
        "reinplace-into-any-input", "an input that the graph does not write stays as it is",
        "npugraph_ex.passes.reinplace:_is_overwritten", _answering(answer=True), "integers",
    ),
    Mutant(
        "replay-skips-an-input", "every input is copied in before every replay",
        "npugraph_ex.aclgraph.captured:CapturedGraph.replay", _skipping_first, "integers",
    ),
    Mutant(
        "replay-overwrites-results", "a result never changes because of a later call",
        "npugraph_ex.aclgraph.outputs:Outputs.held", _answering(answer=False), "integers",
    ),
    Mutant(
        "replay-ignores-addresses", "an input that is used in place and has moved is captured anew",
        "npugraph_ex.aclgraph.inputs:InputPlan.addresses", _answering(()), "integers",
    ),
)  # fmt: skip
