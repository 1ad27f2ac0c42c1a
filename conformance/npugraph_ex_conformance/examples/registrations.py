"""Examples about what a user registers: rules with a condition on a size, rules with a backward, and what is no rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.pattern_matcher import fwd_only, joint_fwd_bwd

import npugraph_ex
from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.conditions import ShapeRange
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.graph.metadata import quiet_refusals
from npugraph_ex_conformance.examples.applied_rules import applied, random_inputs


def of_a_size(draw: random.Random) -> str:
    """A rule for some sizes applies to these, whether they are numbers or symbols."""
    (values,) = random_inputs(draw, torch.float32)
    dim, least, most, factor = draw.randint(-2, 1), draw.randint(0, 3), draw.choice((None, 4, 5)), draw.choice((1, 2))
    size = values.shape[dim]
    fits = size >= least and (most is None or size <= most) and size % factor == 0
    allowed = ShapeRange("x", dim, least, most, factor)
    missing = ShapeRange("x", draw.choice((2, -3)))
    dynamic = draw.random() < 0.5

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(x, 0)

    with register_replacement(search, fused, [values], extra_check=allowed) as rule:
        wrong = applied(torch.relu, [values], [rule], int(fits), dynamic=dynamic)
    with register_replacement(search, fused, [values], extra_check=draw.choice((missing, _raises))) as rule:
        return wrong or applied(torch.relu, [values], [rule], 0, dynamic=dynamic)


def _raises(match: object) -> bool:
    raise KeyError(match)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _with_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.relu(x), x


def _of_the_first(x: torch.Tensor, other: object) -> torch.Tensor:
    del other
    return torch.relu(x)


def refused(draw: random.Random) -> str:
    """What can never be applied is refused where it is registered."""
    example = torch.empty(2, 2)

    def register(search: Callable[..., Any], fused: Callable[..., Any], examples: Sequence[Any], **more: Any) -> None:
        register_replacement(search, fused, examples, **more).remove()

    attempts: Sequence[Callable[[], object]] = (
        lambda: register(lambda x: x.add_(1), lambda x: x + 1, [example]),
        lambda: register(_of_the_first, _of_the_first, [example] * 2),
        lambda: register(_of_the_first, _of_the_first, [example], scalar_workaround={"other": 0.5}),
        lambda: register(_positive, _with_input, [example]),
        lambda: register(_positive, _of_the_first, [example]),
        lambda: register(_with_input, _with_input, [example]),
        lambda: register(lambda x: (x + 1, 2), lambda x: (x + 1, 2), [example]),
        lambda: register(_positive, _positive, [example] * 2),
        lambda: register(lambda x: x @ x, _positive, [torch.empty(2, 3)]),
        lambda: register(
            lambda x, a, b: x * a + b, lambda x, a, b: x * a - -b, [example], scalar_workaround={"a": 0.5, "b": 0.5}
        ),
        lambda: register(_positive, _positive, [example], trace_fn=joint_fwd_bwd),
        lambda: ShapeRange("x", 0, 3, 2),
        lambda: ShapeRange("x", 0, 3, 3, 2),
        lambda: ShapeRange("x", 0, multiple_of=0),
        lambda: ShapeRange("x", 0, at_least=True),
        lambda: ShapeRange("x", None),  # type: ignore[arg-type]
        lambda: ShapeRange(0, 0),  # type: ignore[arg-type]
    )
    for number, attempt in enumerate(draw.sample(attempts, len(attempts))):
        try:
            with quiet_refusals():
                attempt()
        except ReplacementError:
            continue
        return f"rule {attempts.index(attempt)} is accepted (asked as number {number})"
    return ""


def trained(draw: random.Random) -> str:
    """A rule with a backward, and one for inference beside it, in a model that is trained: results and gradients of eager mode."""
    columns = draw.choice((4, 8))
    twice, dynamic, forward_only = draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.3
    generator = torch.Generator().manual_seed(draw.randint(0, 1 << 30))
    made = [torch.rand(shape, generator=generator) + 0.5 for shape in ((3, columns), (columns,), (columns, columns))]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def fused(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.npu.npu_rms_norm(x, weight, 1e-6)[0]

    def model(x: torch.Tensor, weight: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(norm(x @ product, weight))
        return torch.exp(norm(hidden @ product, weight) * 0.1) + x if twice else hidden + x

    def trained_by(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = [value.npu().requires_grad_() for value in made]
        result = function(*inputs)
        result.backward(torch.cos(result.detach()))
        return (result, *(value.grad for value in inputs if value.grad is not None))

    examples = [value.npu().requires_grad_() for value in made[:2]]
    trace_fn = fwd_only if forward_only else joint_fwd_bwd
    with register_replacement(norm, fused, examples, trace_fn=trace_fn) as rule:
        torch.compiler.reset()
        ours = trained_by(torch.compile(model, backend="npugraph_ex", dynamic=dynamic))
        report = npugraph_ex.last_report()
    wanted = 0 if forward_only else 1 + twice
    if report is None or (not forward_only and report.fusions(rule.name) != wanted):
        return f"not {wanted} fusions: {report.table() if report else 'no report'}"
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, trained_by(model), strict=True))
    return "" if same else "other results or gradients than eager mode"
