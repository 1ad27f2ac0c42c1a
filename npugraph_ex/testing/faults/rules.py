"""Faults of the fusion rules: what a rule puts in place of a match computes something else, often only a little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from npugraph_ex.testing.faults._patches import Patch, answering, like
from npugraph_ex.testing.mutation import Mutant

Results = tuple[Any, ...]
_QUANT, _CAST = "add_rms_norm_dynamic_quant", "add_rms_norm_cast"
_STATIC, _PRODUCT = "add_rms_norm_quant", "transpose_batchmatmul"


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


def _with_results(change: Callable[..., Results]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The right results, changed; ``change`` gets the arguments, then the results."""
    return lambda replace: lambda *args: change(args, *replace(*args))


def _with_arguments(change: Callable[..., Results]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda replace: lambda *args: replace(*change(*args))


def _without_smoothing(replace: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        if len(args) != 5:
            return replace(*args)
        x1, x2, gamma, _, epsilon = args
        y, _, total, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=epsilon)
        right = replace(*args)
        return y.view(right[0].shape), scale.view(right[1].shape), total

    return wrong


def _smoothing_twice(replace: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: replace(*args[:3], args[3] * args[3], args[4]) if len(args) == 5 else replace(*args)


def _without_zero_points(replace: Callable[..., Any]) -> Callable[..., Any]:
    """Of its arguments x1, x2, gamma, scales, zero_points, epsilon only the variants with zero points have six."""
    return lambda *args: replace(*args[:4], torch.zeros_like(args[4]), args[5]) if len(args) == 6 else replace(*args)


def _one_step_up(_args: Any, quantised: torch.Tensor, total: torch.Tensor) -> Results:
    return torch.where(quantised < 127, quantised + 1, quantised), total


def _mutant(name: str, breaks: str, rule: str, change: Any) -> Mutant:
    family = "planted" if rule == _QUANT else f"planted {rule}"
    return Mutant(name, breaks, "npugraph_ex.fusion.engine:chosen_rules", _replacing(rule, change), family)


MUTANTS = (
    _mutant("quant-drops-smoothing", "the fused operator gets every argument of the pair", _QUANT, _without_smoothing),
    _mutant("quant-smooths-twice", "the fused operator smooths once", _QUANT, _smoothing_twice),
    _mutant(
        "quant-drops-epsilon", "the fused operator gets the norm's epsilon", _QUANT,
        _with_arguments(lambda *args: (*args[:-1], 0.0)),
    ),
    _mutant(
        "quant-adds-one-to-gamma", "gamma is the norm's own", _QUANT,
        _with_arguments(lambda x1, x2, gamma, *rest: (x1, x2, gamma + 1, *rest)),
    ),
    _mutant(
        "quant-subtracts-residual", "each result takes the place of the one that it equals", _QUANT,
        _with_results(lambda args, y, scale, _total: (y, scale, torch.sub(args[0], args[1]))),
    ),
    _mutant(
        "quant-rounds-residual-twice", "a result is rounded once, to its own dtype", _QUANT,
        _with_results(lambda _args, y, scale, total: (y, scale, (total * 0.0625 + 3.0 - 3.0) * 16)),
    ),
    _mutant(
        "quant-divides-by-128", "the scale is the largest value over 127", _QUANT,
        _with_results(lambda _args, y, scale, total: (y, scale * (127 / 128), total)),
    ),
    _mutant(
        "quant-inverts-scale", "the scale multiplies, it does not divide", _QUANT,
        _with_results(lambda _args, y, scale, total: (y, 1 / scale, total)),
    ),
    _mutant(
        "quant-saturates-early", "the largest value quantises to 127", _QUANT,
        _with_results(lambda _args, y, scale, total: (y.clamp(-126, 126), scale, total)),
    ),
    _mutant(
        "quant-is-off-by-one", "a value quantises to the nearest step", _QUANT,
        _with_results(lambda _args, y, scale, total: (torch.where(y == 0, y + 1, y), scale, total)),
    ),
    _mutant(
        "cast-drops-epsilon", "the fused operator gets the norm's epsilon", _CAST,
        _with_arguments(lambda *args: (*args[:-1], 0.0)),
    ),
    _mutant(
        "cast-returns-wide-sum", "the wide result is the norm", _CAST,
        _with_results(lambda _args, wide, *rest: (rest[-1].to(torch.float32).view(wide.shape), *rest)),
    ),
    _mutant(
        "cast-inverts-deviation", "the reciprocal of the deviation is handed out, not the deviation", _CAST,
        _with_results(lambda _args, wide, *rest: (wide, *rest[:-2], 1 / rest[-2], rest[-1])),
    ),
    _mutant("static-quant-drops-zero-points", "the zero points are added", _STATIC, _without_zero_points),
    _mutant(
        "static-quant-inverts-scales", "the scales divide where the pair divided, and multiply where it multiplied", _STATIC,
        _with_arguments(lambda x1, x2, gamma, scales, *rest: (x1, x2, gamma, 1 / scales, *rest)),
    ),
    _mutant(
        "static-quant-drops-epsilon", "the fused operator gets the norm's epsilon", _STATIC,
        _with_arguments(lambda *args: (*args[:-1], 0.0)),
    ),
    _mutant(
        "static-quant-is-off-by-one", "a value quantises to the nearest step", _STATIC, _with_results(_one_step_up)
    ),
    _mutant(
        "static-quant-subtracts-residual", "each result takes the place of the one that it equals", _STATIC,
        _with_results(lambda args, quantised, _total: (quantised, torch.sub(args[0], args[1]))),
    ),
    _mutant(
        "transpose-takes-magnitudes", "the fused product gets the operands as they are", _PRODUCT,
        lambda replace: lambda x1, x2: replace(x1, x2.abs()),
    ),
    _mutant(
        "transpose-negates-the-product", "the fused product is the product", _PRODUCT,
        lambda replace: lambda x1, x2: -replace(x1, x2),
    ),
    Mutant(
        "muls-add-rounds-numbers", "a number that alpha would round is left to the product",
        "npugraph_ex.fusion.rules.muls_add:_is_exact", answering(answer=True), "near-miss muls_add",
    ),
)  # fmt: skip
