"""Examples about what a user's rule takes: which of several calls, which values, random numbers in which order."""

from __future__ import annotations

import random
from functools import partial

import torch
from torch._inductor.pattern_matcher import CallFunction, KeywordArg

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex_conformance.examples.applied_rules import applied, random_inputs

_ATEN = torch.ops.aten
_Two = tuple[torch.Tensor, torch.Tensor]


def chosen_by_numbers(draw: random.Random) -> str:
    """Of several calls of one operator on one value, the numbers say which are the pattern's."""
    (values,) = random_inputs(draw, torch.float32)
    first, second, *others = draw.sample(range(2, 8), draw.randint(3, 5))

    def search(x: torch.Tensor) -> _Two:
        return torch.mul(x, first), torch.mul(x, second)

    def fused(x: torch.Tensor) -> _Two:
        return torch.mul(torch.neg(x), -first), torch.mul(torch.neg(x), -second)

    order = draw.sample([first, second, *others], 2 + len(others))
    with register_replacement(search, fused, [values]) as rule:
        return applied(lambda x: [torch.mul(x, number) for number in order], [values], [rule], 1)


def own_value(draw: random.Random) -> str:
    """An argument of the rule is a value that the match computes, and that a fused operator does not have before it runs.

    The replacement may be the pattern with its operands exchanged.
    """
    values = random_inputs(draw, torch.float32, torch.float32)
    shows, alike = draw.random() < 0.5, draw.random() < 0.5

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mul(torch.relu(x), y)

    def fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mul(y, torch.relu(x) if alike else torch.clamp_min(x, 0))

    def search_both(x: torch.Tensor, y: torch.Tensor) -> _Two:
        return search(x, y), torch.relu(x)

    def fused_both(x: torch.Tensor, y: torch.Tensor) -> _Two:
        return fused(x, y), torch.clamp_min(x, 0)

    def squared(x: torch.Tensor, y: torch.Tensor) -> _Two:
        positive = torch.relu(x)
        return torch.mul(positive, positive), positive if shows else y

    def product(x: torch.Tensor, y: torch.Tensor) -> _Two:
        positive, other = torch.relu(x), torch.neg(y)
        return torch.mul(positive, other), positive if shows else y

    register = (
        partial(register_replacement, search_both, fused_both)
        if shows
        else partial(register_replacement, search, fused)
    )
    with register(values) as rule:
        return applied(squared, values, [rule], 0) or applied(product, values, [rule], 1)


def drawn_in_order(draw: random.Random) -> str:
    """The match draws random numbers: who draws in between would get the other's numbers."""
    values = random_inputs(draw, torch.float32, torch.float32)
    place = draw.choice(("before", "between", "after"))

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(_ATEN.bernoulli.p(x, 0.5))

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(_ATEN.bernoulli.p(x, 0.5), 0)

    def beside(x: torch.Tensor, y: torch.Tensor) -> _Two:
        early = _ATEN.bernoulli.p(y, 0.5) if place == "before" else y
        dropped = _ATEN.bernoulli.p(x, 0.5)
        early = _ATEN.bernoulli.p(y, 0.5) if place == "between" else early
        kept = torch.relu(dropped)
        return kept, _ATEN.bernoulli.p(y, 0.5) if place == "after" else early

    with register_replacement(search, fused, values[:1]) as rule:
        return applied(beside, values, [rule], int(place != "between"))


def begins_elsewhere(draw: random.Random) -> str:
    """A result that is a part of a larger one: a reader that counts from the beginning of the memory tells the second half."""
    (values,) = random_inputs(draw, torch.float32)
    second = draw.random() < 0.5

    def negative(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)

    def fused(x: torch.Tensor) -> torch.Tensor:
        parts = (torch.abs(x), torch.mul(x, -1)) if second else (torch.mul(x, -1), torch.abs(x))
        return torch.cat(parts)[x.shape[0] :] if second else torch.cat(parts)[: x.shape[0]]

    def read(x: torch.Tensor) -> torch.Tensor:
        return negative(x).as_strided((2,), (1,), 0) * 1

    with register_replacement(negative, fused, [values]) as rule:
        return applied(read, [values], [rule], int(not second))


def unnamed_by_hand(draw: random.Random) -> str:
    """A pattern by hand does not name an argument: it stands for the default, and no other value."""
    values = random_inputs(draw, torch.float32, torch.float32)
    factor = draw.choice((2, -1, 0.5))

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(x, y)

    def fused(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, torch.neg(y))

    pattern = CallFunction(_ATEN.add.Tensor, KeywordArg("x"), KeywordArg("y"))
    with register_replacement(search, fused, values, search_fn_pattern=pattern) as rule:
        wrong = applied(search, values, [rule], 1)
        return wrong or applied(lambda x, y: torch.add(x, y, alpha=factor), values, [rule], 0)
