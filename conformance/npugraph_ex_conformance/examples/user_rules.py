"""Examples about rules that users register: twice, for a missing operator, met by a graph that they do not fit, or wrong.

Each is a small rule, a graph of the CPU, and what must come of the two: how many fusions, and the same results.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, nullcontext

import torch
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, MultiOutputPattern
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion.registry import Registration, register_replacement
from npugraph_ex_conformance.examples.applied_rules import applied, random_inputs
from npugraph_ex_conformance.examples.registrations import of_a_size, refused, trained
from npugraph_ex_conformance.examples.rule_matches import (
    begins_elsewhere,
    chosen_by_numbers,
    drawn_in_order,
    own_value,
    unnamed_by_hand,
)
from npugraph_ex_conformance.examples.wrong_numbers import one_step_off

_ATEN = torch.ops.aten


def user_rule_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. ``seed`` modulo 14 chooses its kind."""
    kinds = (
        _registered_again, _of_a_missing_operator, _promoted, _reshaped, _copying_a_view, chosen_by_numbers, own_value,
        drawn_in_order, begins_elsewhere, of_a_size, refused, trained, unnamed_by_hand, one_step_off,
    )  # fmt: skip
    try:
        return kinds[seed % len(kinds)](random.Random(seed))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def _clamped(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(x, 0)


def _missing(x: torch.Tensor) -> torch.Tensor:
    fused: torch.Tensor = torch.ops.npu.npu_operator_of_another_soc(x)
    return fused


def _registered_again(draw: random.Random) -> str:
    """Every model registers its rules; they fuse until the last one has taken them back."""
    inputs = random_inputs(draw, torch.float32)
    with ExitStack() as stack:
        handles = [
            _registered(stack, skip_duplicates=draw.random() < 0.5, beside_fakes=draw.random() < 0.5)
            for _ in range(draw.randint(2, 3))
        ]
        for handle in draw.sample(handles, len(handles)):
            wrong = applied(torch.relu, inputs, [handle], 1)
            if wrong:
                return wrong
            handle.remove()
        return applied(torch.relu, inputs, handles, 0)


def _registered(stack: ExitStack, *, skip_duplicates: bool, beside_fakes: bool) -> Registration:
    """A rule that the stack takes back, registered where the caller has a fake mode of its own, or none."""
    with FakeTensorMode() if beside_fakes else nullcontext():
        rule = register_replacement(_relu, _clamped, [torch.empty(2, 2)], skip_duplicates=skip_duplicates)
    return stack.enter_context(rule)


def _of_a_missing_operator(draw: random.Random) -> str:
    """It is registered all the same, does nothing, and does not keep another rule from working."""
    inputs, example = random_inputs(draw, torch.float32), torch.empty(2, 2)
    with register_replacement(_relu, _missing, [example]) as first:
        alone = applied(torch.relu, inputs, [first], 0)
        with register_replacement(_relu, _clamped, [example]) as second:
            return alone or applied(torch.relu, inputs, [first, second], 1)


def _promoted(draw: random.Random) -> str:
    """Right for two tensors of one dtype, and not where the first is the narrower of two."""
    narrow, wide = draw.choice(((torch.float16, torch.float32), (torch.int32, torch.float32)))
    inputs, example = random_inputs(draw, narrow, wide), torch.empty(2, 2)

    def difference_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, y)

    def sum_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(x, torch.neg(y)).to(x.dtype)

    with register_replacement(difference_of, sum_of, [example, example]) as rule:
        same = [inputs[1], inputs[1] * 2]
        return applied(difference_of, same, [rule], 1) or applied(difference_of, inputs, [rule], 0)


def _copying_a_view(draw: random.Random) -> str:
    """A fused operator copies what the pattern returns as a view of its input: the view stays, and is written and read."""
    (values,) = random_inputs(draw, torch.float32)
    part = draw.randint(1, values.shape[1] - 1)
    reads_early = draw.random() < 0.5

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.split([part, x.shape[1] - part], dim=-1)
        return torch.relu(first), second

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.split([part, x.shape[1] - part], dim=-1)
        return torch.clamp_min(first, 0), second.clone(memory_format=torch.contiguous_format)

    def written(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first, second = split(x)
        early = second.as_strided((2,), (x.shape[1],), 0) * 1 if reads_early else first
        second.mul_(3)
        return torch.cat([first.flatten(), x.flatten(), early.flatten()])

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)

    def turned_copy(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).clone(memory_format=torch.preserve_format)

    def written_turned(x: torch.Tensor) -> torch.Tensor:
        turned(x).mul_(3)
        return x * 1

    with register_replacement(split, fused, [values]) as rule:
        wrong = applied(written, [values], [rule], 1)
    with register_replacement(turned, turned_copy, [values]) as rule:
        return wrong or applied(written_turned, [values], [rule], 0)


def _reshaped(draw: random.Random) -> str:
    """A pattern by hand that takes every view for a flatten, with a search function that only stands in for it."""
    first, second, last = draw.sample(range(2, 6), 3)
    values = torch.randn(first, second, last, generator=torch.Generator().manual_seed(draw.randint(0, 1 << 30)))
    pattern = MultiOutputPattern(
        [CallFunction(_ATEN.relu.default, CallFunction(_ATEN.view.default, KeywordArg("x"), Ignored()))]
    )

    def stands_in(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), torch.neg(x)

    def flattened(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(x.flatten(0, 1), 0)

    with register_replacement(stands_in, flattened, [values], search_fn_pattern=pattern) as rule:
        right = applied(lambda x: torch.relu(x.view(first * second, last)), [values], [rule], 1)
        return right or applied(lambda x: torch.relu(x.view(last, first * second)), [values], [rule], 0)
