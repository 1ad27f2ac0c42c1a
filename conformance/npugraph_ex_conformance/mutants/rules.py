"""Faults of the fusion rules: what a rule puts in place of a match computes something else, often only a little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import Patch, answering, like

_RULES = "npugraph_ex.passes.fusion:chosen_rules"
_QUANT = "add_rms_norm_dynamic_quant"


def _replacing(rule: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Change what one built-in rule puts in place of a match; ``change`` gets and gives a replacement function."""

    def changed(prepared: Any) -> Any:
        if prepared.rule.name != rule:
            return prepared
        right = prepared.rule.replace
        return dataclasses.replace(
            prepared, rule=dataclasses.replace(prepared.rule, replace=like(right, change(right)))
        )

    def replacement(original: Callable[..., tuple[Any, ...]]) -> Any:
        return lambda *args, **kwargs: tuple(map(changed, original(*args, **kwargs)))

    return replacement


def _without_epsilon(replace: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: replace(*args[:-1], 0.0)


def _with_difference(replace: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (*replace(*args)[:-1], torch.sub(args[0], args[1]))


def _without_smoothing(replace: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        if len(args) != 5:
            return replace(*args)
        x1, x2, gamma, _, epsilon = args
        y, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=epsilon)
        right = replace(*args)
        return y.view(right[0].shape), scale.view(right[1].shape), total

    return wrong


MUTANTS = (
    Mutant(
        "quant-drops-smoothing", "the fused operator gets every argument of the pair",
        _RULES, _replacing(_QUANT, _without_smoothing), "planted",
    ),
    Mutant(
        "quant-drops-epsilon", "the fused operator gets the norm's epsilon",
        _RULES, _replacing(_QUANT, _without_epsilon), "planted",
    ),
    Mutant(
        "quant-subtracts-residual", "each result replaces the result that it equals",
        _RULES, _replacing(_QUANT, _with_difference), "planted",
    ),
    Mutant(
        "transposed-product-of-any-size", "an operator is not given sizes that it does not take",
        "npugraph_ex.fusion.rules.transpose_batchmatmul:holds", answering(answer=True), "near-miss transposed product",
    ),
    Mutant(
        "muls-add-rounds-numbers", "a number that alpha would round is not fused",
        "npugraph_ex.fusion.rules.muls_add:is_exact", answering(answer=True), "near-miss muls_add",
    ),
)  # fmt: skip
