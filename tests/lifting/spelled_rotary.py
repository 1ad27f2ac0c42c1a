"""Spellings of rotary embedding, and what nearly is one: functions by name, and their shapes."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _half(x: Any) -> Any:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _half_by_chunks(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second * -1, first), dim=-1)


def _pairs(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotated_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + _half(x) * sin


def rotated_chunks(x: Any, cos: Any, sin: Any) -> Any:
    return sin * _half_by_chunks(x) + cos * x


def rotated_in_float32(x: Any, cos: Any, sin: Any) -> Any:
    wide = x.float()
    return (wide * cos.float() + _half(wide) * sin.float()).to(x.dtype)


def rotated_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos[0] + _pairs(x) * sin[0]


def rotated_heads_behind(x: Any, cos: Any, sin: Any) -> Any:
    """As `transformers` has it: heads and positions change places in memory."""
    x = x.transpose(1, 2)
    return x * cos.transpose(1, 2) + _half(x) * sin.transpose(1, 2)


def rotated_by_wide_cosines(x: Any, cos: Any, sin: Any) -> Any:
    """As OLMo 2 has it: cosines in float32, which the products are computed in."""
    cos, sin = cos.float() * 1.5, sin.float() * 1.5
    return (x * cos + _half(x) * sin).to(x.dtype)


def rotated_by_cosines_of_rank_two(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos[0, :, 0].unsqueeze(1) + _half(x) * sin[0, :, 0].unsqueeze(1)


def rotated_by_parts_of_tables(x: Any, cos: Any, sin: Any) -> Any:
    """Each part by its own part of the cosines and sines."""
    (first, second), (cosine, cosines), (sine, sines) = (one.chunk(2, -1) for one in (x, cos, sin))
    return torch.cat((first * cosine - second * sine, second * cosines + first * sines), -1)


def rotated_by_addcmul(x: Any, cos: Any, sin: Any) -> Any:
    return torch.addcmul(x * cos, _half(x), sin)


def rotated_the_other_way(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, -1)
    return x * cos - torch.cat((second, -first), -1) * sin


def _written(out: Any, first: Any, second: Any, values: tuple[Any, Any]) -> Any:
    out[..., first], out[..., second] = values
    return out


def _by_parts(of_x: Any, of_cos: Any, of_sin: Any) -> tuple[Any, Any]:
    (one, other), (cosine, cosines), (sine, sines) = of_x, of_cos, of_sin
    return one * cosine - other * sine, other * cosines + one * sines


def rotated_into_halves(x: Any, cos: Any, sin: Any) -> Any:
    """Each half is written to its place in a new tensor."""
    parts = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.empty_like(x), slice(0, 8), slice(8, None), parts)


def rotated_into_pairs(x: Any, cos: Any, sin: Any) -> Any:
    parts = _by_parts(*((one[..., ::2], one[..., 1::2]) for one in (x, cos[0], sin[0])))
    return _written(torch.zeros_like(x), slice(1, None, 2), slice(0, None, 2), parts[::-1])


def rotated_in_two_rows(x: Any, cos: Any, sin: Any) -> Any:
    """The halves are rows, which are put side by side."""
    parts = _by_parts(x.unflatten(-1, (2, 8)).unbind(-2), cos.chunk(2, -1), sin.chunk(2, -1))
    return torch.stack(parts, -2).flatten(-2)


def rotated_rows(x: Any, cos: Any, sin: Any) -> Any:
    """The halves are rows of a matrix, and are stacked as rows again."""
    first, second = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return x * cos + torch.stack((-second, first), -2).view(x.shape) * sin


def rotated_by_tables_that_are_read_twice(x: Any, cos: Any, sin: Any) -> Any:
    places = torch.arange(2, -1, -1, device=x.device)
    (first, second), cos, sin = x.chunk(2, -1), cos[..., :8], sin[..., :8]
    return torch.cat((
        first * cos.index_select(1, places) - second * sin.index_select(1, places),
        second * cos.index_select(1, places) + first * sin.index_select(1, places),
    ), -1)  # fmt: skip


ROTARY: tuple[Callable[..., Any], ...] = (
    rotated_halves, rotated_chunks, rotated_in_float32, rotated_pairs, rotated_heads_behind,
    rotated_by_cosines_of_rank_two, rotated_by_parts_of_tables, rotated_by_addcmul, rotated_the_other_way,
    rotated_into_halves, rotated_into_pairs, rotated_in_two_rows, rotated_rows,
)  # fmt: skip


def rotated_by_tables_cut_each_time(x: Any, cos: Any, sin: Any) -> Any:
    """The first half of each table stands for both."""
    first, second = x.chunk(2, -1)
    upper = first * cos[..., :8] - second * sin[..., :8]
    return torch.cat((upper, first * sin[..., :8] + second * cos[..., :8]), -1)


def sign_on_the_other_half(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, -first), dim=-1) * sin


def halves_the_other_way_round(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-first, second), dim=-1) * sin


def halves_of_two_tensors(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)[0], (x + 1).chunk(2, dim=-1)[1]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def pairs_joined_as_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1) * sin


def pairs_stacked_as_rows(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2) * sin


def cosines_of_another(x: Any, cos: Any, sin: Any) -> Any:
    return (x + 1) * cos + _half(x) * sin


def scaled_sum(x: Any, cos: Any, sin: Any) -> Any:
    return torch.add(x * cos, _half(x) * sin, alpha=2)


def pairs_by_tables_of_each_entry(x: Any, cos: Any, sin: Any) -> Any:
    """The device turns halves by tables of the batch's entries, and pairs by one table for all."""
    return x * cos + _pairs(x) * sin


def tables_of_two_shapes(x: Any, cos: Any, sin: Any) -> Any:
    """The device takes cosines and sines of one shape."""
    return x * cos + _half(x) * sin[:1]


def turned_by_one_number(x: Any, cos: Any, sin: Any) -> Any:
    """The sine is a tensor without dimensions."""
    return x * cos + _half(x) * sin[0, 0, 0, 0]


def rolled(x: Any, cos: Any, sin: Any) -> Any:
    """The sines carry the sign."""
    return x * cos + torch.roll(x, 8, -1) * sin


def rolled_by_sines_with_signs(x: Any, cos: Any, sin: Any) -> Any:
    wide, signed = x.float(), torch.cat((-sin[..., :8], sin[..., 8:]), -1)
    return (wide * cos + wide.roll(-8, dims=-1) * signed).to(x.dtype)


def halves_change_places(x: Any, cos: Any, sin: Any) -> Any:
    return torch.cat((x[..., 8:], x[..., :8]), -1) * sin + cos * x


def flipped_halves(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + (x.unflatten(-1, (2, 8)).flip(-2) * sin[0, 0, 0].view(2, 8)).flatten(-2) * sin


def flipped_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + (x.unflatten(-1, (8, 2)).flip(-1) * sin[0, 0, 0, :2]).flatten(-2) * sin


def rolled_by_a_quarter(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.roll(x, 4, -1) * sin


def rotated_into_the_other_halves(x: Any, cos: Any, sin: Any) -> Any:
    parts = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.empty_like(x), slice(8, None), slice(0, 8), parts)


def rotated_into_less_than_all(x: Any, cos: Any, sin: Any) -> Any:
    """One element of the new tensor stays zero."""
    first, second = _by_parts(*(one.chunk(2, -1) for one in (x, cos, sin)))
    return _written(torch.zeros_like(x), slice(0, 8), slice(8, 15), (first, second[..., :7]))


def turned_as_complex_numbers(x: Any, cos: Any, sin: Any) -> Any:
    """As Llama's first implementation has it."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turn = torch.complex(cos[..., ::2].float(), sin[..., ::2].float())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def turned_by_matrices(x: Any, cos: Any, sin: Any) -> Any:
    """As Flux has it: a matrix for each pair."""
    c, s = cos[..., :8], sin[..., :8]
    turns = torch.stack((c, -s, s, c), dim=-1).unflatten(-1, (2, 2)).float()
    pairs = x.float().unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


NOT_ROTARY: dict[Callable[..., Any], str] = {
    turned_by_matrices: "each pair is multiplied by a matrix of its own",
    rolled: "a sign, which is in the sines; give the sign to the half of x",
    rolled_by_sines_with_signs: "a sign, which is in the sines; give the sign to the half of x",
    halves_change_places: "a sign, which is in the sines; give the sign to the half of x",
    flipped_halves: "a sign, which a tensor has; give the sign to the half of x, if the signs are -1 and 1",
    flipped_pairs: "the elements of each pair change places without a sign, which a tensor has",
    rolled_by_a_quarter: "",
    rotated_into_the_other_halves: "",
    rotated_into_less_than_all: "",
    turned_as_complex_numbers: "a product of complex numbers is one kernel",
    sign_on_the_other_half: "is not the negated one",
    halves_the_other_way_round: "neither halves nor pairs",
    pairs_stacked_as_rows: "neither halves nor pairs",
    halves_of_two_tensors: "of different tensors",
    pairs_joined_as_halves: "neither halves nor pairs",
    cosines_of_another: "is no product with",
    pairs_by_tables_of_each_entry: "tables along one dimension",
    tables_of_two_shapes: "npu_rotary_mul takes one shape",
    turned_by_one_number: "cosines or sines are [] and x",
    scaled_sum: "",
}


ROTARY_SPECS = ((2, 3, 4, 16), (2, 3, 1, 16), (2, 3, 1, 16))
