"""Spellings of RMS norms, and what nearly is one: functions by name, and the shapes of all norms."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH = 64
EPSILON = 1e-5


def llama_norm(x: Any, w: Any) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return w * wide.to(x.dtype)


def weight_in_float32(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, True) + EPSILON) * w.float()).type_as(x)


def of_torch(x: Any, w: Any) -> Any:
    return functional.rms_norm(x, (WIDTH,), w, EPSILON)


def quotient_by_a_root(x: Any, w: Any) -> Any:
    wide = x.float()
    return ((wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + EPSILON)) * w).to(x.dtype)


def power_of_minus_a_half(x: Any, w: Any) -> Any:
    wide = x.float()
    return (torch.pow(EPSILON + wide.pow(2).mean(-1, True), -0.5) * (w * wide)).to(x.dtype)


def sum_over_size(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / WIDTH + EPSILON)).to(x.dtype)


def dimension_put_back(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1) + EPSILON).unsqueeze(-1)).to(x.dtype)


def weight_reshaped(x: Any, w: Any) -> Any:
    wide = x.float()
    return w.view(1, -1).unsqueeze(0) * (wide * torch.rsqrt(wide.pow(2).mean(2, True) + EPSILON)).to(x.dtype)


def twice_upcast(x: Any, w: Any) -> Any:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return w * (x.float() * torch.rsqrt(variance + EPSILON)).to(x.dtype)


def without_weight(x: Any, w: Any) -> Any:
    del w
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + EPSILON)).to(x.dtype)


def rounded_all_along(x: Any, w: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * w


def without_epsilon(x: Any, w: Any) -> Any:
    return w * (x / x.pow(2).mean(-1, keepdim=True).sqrt())


def by_its_length(x: Any, w: Any) -> Any:
    return x / (x.norm(dim=-1, keepdim=True) * WIDTH**-0.5) * w


def by_the_square_of_its_length(x: Any, w: Any) -> Any:
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return w * (wide * torch.rsqrt(length**2 / WIDTH + EPSILON)).to(x.dtype)


def sum_times_the_root_of_its_size(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + EPSILON) * math.sqrt(WIDTH)).to(x.dtype)


def normalised_by_torch(x: Any, w: Any) -> Any:
    """No row of float16 is near the least length of 1e-12, unless it is zero."""
    return (functional.normalize(x.float(), dim=-1) * math.sqrt(WIDTH) * w).to(x.dtype)


def root_that_is_indexed(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * (1 / torch.sqrt(wide.pow(2).mean(-1) + EPSILON))[..., None]).to(x.dtype)


def root_that_is_viewed(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide / (wide.pow(2).mean(-1) + EPSILON).sqrt().reshape(*x.shape[:-1], 1)).to(x.dtype)


def inverse_root_that_is_viewed(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * (wide.pow(2).mean(-1) + EPSILON).sqrt().reciprocal().view(2, 3, 1)).to(x.dtype)


def rows_of_a_matrix(x: Any, w: Any) -> Any:
    """The rows go back to their places before the cast does."""
    rows = x.float().view(-1, WIDTH)
    return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPSILON) * w.float()).view(x.shape).to(x.dtype)


def rows_of_a_matrix_and_a_weight(x: Any, w: Any) -> Any:
    rows = x.float().view(-1, WIDTH)
    return (rows / torch.sqrt(rows.pow(2).mean(-1, keepdim=True) + EPSILON)).view(x.shape).to(x.dtype) * w


def rows_that_stay_a_matrix(x: Any, w: Any) -> Any:
    rows = x.float().flatten(0, 1)
    return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * w


def product_that_is_added_to_zeros(x: Any, w: Any) -> Any:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return w * torch.addcmul(torch.zeros_like(wide), wide, root).to(x.dtype)


def _of_means(root: Callable[[Any], Any]) -> Callable[..., Any]:
    """A norm with this inverse root of its means, a number for each row."""

    def norm(x: Any, w: Any) -> Any:
        wide = x.float()
        return w * (wide * root(wide.pow(2).mean(-1) + EPSILON).unsqueeze(-1)).to(x.dtype)

    return norm


def _of_sums(total: Callable[[Any], Any]) -> Callable[..., Any]:
    """A norm whose squares are added up so, a number for each row."""

    def norm(x: Any, w: Any) -> Any:
        wide = x.float()
        return w * (wide * torch.rsqrt(total(wide) / WIDTH + EPSILON).unsqueeze(-1)).to(x.dtype)

    return norm


def _times_size(mean: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A sum by a mean that keeps its dimension."""
    return lambda x: WIDTH * mean(x).squeeze(-1)


def _named(prefix: str, functions: dict[str, Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    for name, function in functions.items():
        function.__name__ = f"{prefix}_{name}"
    return (*functions.values(),)


SUMS = _named("sum", {name: _of_sums(total) for name, total in {
    "by_einsum": lambda x: torch.einsum("bsd,bsd->bs", x, x),
    "by_einsum_of_any_rank": lambda x: torch.einsum("...d,...d->...", x, x),
    "by_a_product_of_rows": lambda x: (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1).squeeze(-1),
    "by_bmm": lambda x: torch.bmm(x.reshape(-1, 1, WIDTH), x.reshape(-1, WIDTH, 1)).view(x.shape[:-1]),
    "by_einsum_of_a_matrix": lambda x: torch.einsum("nd,nd->n", x.flatten(0, 1), x.flatten(0, 1)).view(x.shape[:-1]),
    "by_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "of_squared_magnitudes": lambda x: x.abs().pow(2).sum(-1),
    "of_products_of_magnitudes": lambda x: (x.abs() * x.abs()).sum(-1),
    "by_a_length": lambda x: x.norm(dim=-1).square(),
    "by_ones": lambda x: x.pow(2) @ torch.ones(WIDTH, device=x.device),
    "by_a_column_of_ones": lambda x: (x.pow(2) @ torch.ones(WIDTH, 1, device=x.device)).squeeze(-1),
    "by_einsum_and_ones": lambda x: torch.einsum("bsd,d->bs", x * x, torch.ones(WIDTH, device=x.device)),
    "by_a_running_sum": lambda x: x.square().cumsum(-1)[..., -1],
    "by_two_sums": lambda x: x.square().unflatten(-1, (8, 8)).sum(-1).sum(-1),
    "on_a_diagonal": lambda x: (x @ x.mT).diagonal(dim1=-2, dim2=-1),
    "of_roots_of_fourth_powers": lambda x: x.pow(4).sqrt().sum(-1),
}.items()})  # fmt: skip
MEANS = _named("mean", {name: _of_sums(_times_size(mean)) for name, mean in {
    "by_a_pool": lambda x: functional.avg_pool1d(x.pow(2), WIDTH),
    "by_an_adaptive_pool": lambda x: functional.adaptive_avg_pool1d(x.pow(2), 1),
    "by_parts_of_one": lambda x: x.pow(2) @ torch.full((WIDTH, 1), 1 / WIDTH, device=x.device),
    "by_ones_that_are_divided": lambda x: (x * x) @ (torch.ones(WIDTH, 1, device=x.device) / WIDTH),
    "by_a_linear_layer": lambda x: functional.linear(x * x, torch.full((1, WIDTH), 1 / WIDTH, device=x.device)),
    "in_each_column": lambda x: ((x * x) @ torch.full((WIDTH, WIDTH), 1 / WIDTH, device=x.device))[..., :1],
}.items()})  # fmt: skip
ROOTS = _named("root", {name: _of_means(root) for name, root in {
    "by_a_logarithm": lambda v: torch.exp(-0.5 * torch.log(v)),
    "by_a_binary_logarithm": lambda v: torch.exp2(torch.log2(v) / -2),
    "by_an_inverse_exponential": lambda v: 1 / torch.exp(torch.log(v).mul(0.5)),
    "of_an_inverse": lambda v: torch.sqrt(torch.reciprocal(v)),
    "by_a_power_of_an_inverse": lambda v: (1 / v) ** 0.5,
    "to_the_power_of_minus_one": lambda v: v.sqrt() ** -1,
    "by_an_inverse_power": lambda v: 1 / v**0.5,
    "by_two_powers": lambda v: (v**-0.25) ** 2,
    "by_a_power": lambda v: v**-0.5,
    "that_is_inverted_twice": lambda v: v.rsqrt().reciprocal().reciprocal(),
    "by_a_sum_of_logarithms": lambda v: torch.exp(-0.5 * torch.logaddexp((v - EPSILON).log(), v.new_full((), EPSILON).log())),
}.items()})  # fmt: skip


def epsilon_in_the_mean(x: Any, w: Any) -> Any:
    wide = x.float()
    return (w * (wide * (EPSILON + wide**2).mean(-1, True).sqrt().reciprocal())).to(x.dtype)


def mean_in_each_column(x: Any, w: Any) -> Any:
    """As a cube core likes it."""
    wide = x.float()
    mean = (wide * wide) @ torch.full((WIDTH, WIDTH), 1 / WIDTH, device=x.device)
    return w * (wide * torch.rsqrt(mean + EPSILON)).to(x.dtype)


def root_of_a_size_by_a_sum(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.sqrt(WIDTH / (wide.pow(2).sum(-1, keepdim=True) + WIDTH * EPSILON))).to(x.dtype)


def inverse_of_a_length(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * (WIDTH**0.5 / wide.norm(dim=-1)).unsqueeze(-1)).to(x.dtype)


NORMS: tuple[Callable[..., Any], ...] = (
    llama_norm, weight_in_float32, of_torch, quotient_by_a_root, power_of_minus_a_half, sum_over_size,
    dimension_put_back, weight_reshaped, twice_upcast, without_weight, rounded_all_along,
    without_epsilon, by_its_length, by_the_square_of_its_length, sum_times_the_root_of_its_size, normalised_by_torch,
    root_that_is_indexed, root_that_is_viewed, inverse_root_that_is_viewed,
    rows_of_a_matrix, rows_of_a_matrix_and_a_weight, rows_that_stay_a_matrix, product_that_is_added_to_zeros,
    *SUMS, *MEANS, *ROOTS, root_of_a_size_by_a_sum, inverse_of_a_length, epsilon_in_the_mean, mean_in_each_column,
)  # fmt: skip


def norm_of_a_step_by_rms(x: Any, w: Any) -> Any:
    """With an RMS norm, and the scale counted from one."""
    return rounded_all_along(x, 1 + w[None, None].sigmoid())


def gemma_norm(x: Any, w: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON) * (1.0 + w.float())).type_as(x)


def _counted_from_one(end: Callable[..., Any], *, cast: bool) -> Callable[..., Any]:
    """A norm, which may be cast back before its weight comes."""

    def norm(x: Any, w: Any) -> Any:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return end(normed.to(x.dtype), w) if cast else end(normed, w.float()).to(x.dtype)

    return norm


_ENDS = {
    "norm_plus_weighted_norm": lambda n, w: n + n * w,
    "weighted_norm_plus_norm": lambda n, w: w * n + n,
    "norm_and_weight_by_addcmul": lambda n, w: torch.addcmul(n, n, w),
    "norm_minus_negative": lambda n, w: n - n * -w,
}
COUNTED_FROM_ONE = (
    *_named("wide", {name: _counted_from_one(end, cast=False) for name, end in _ENDS.items()}),
    *_named("cast", {name: _counted_from_one(end, cast=True) for name, end in _ENDS.items()}),
)


def epsilon_outside(x: Any, w: Any) -> Any:
    wide = x.float()
    return (w * wide / (torch.sqrt(wide.pow(2).mean(-1, True)) + EPSILON)).to(x.dtype)


def epsilon_and_a_length(x: Any, w: Any) -> Any:
    """As the first implementation of an RMS norm has it."""
    return w * (x / (x.norm(2, dim=-1, keepdim=True) * WIDTH**-0.5 + EPSILON))


def least_length(x: Any, w: Any) -> Any:
    return x / (torch.norm(x, dim=-1, keepdim=True) * WIDTH**-0.5).clamp(min=EPSILON) * w


def least_mean(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, True).clamp(min=EPSILON))).to(x.dtype)


def mean_that_is_subtracted(x: Any, w: Any) -> Any:
    return x * torch.rsqrt(100 + -x.pow(2).sum(-1, True) / WIDTH) * w


def divided_by_its_length(x: Any, w: Any) -> Any:
    return functional.normalize(x, dim=-1) * w


def mean_over_rows(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(1, True) + EPSILON)).to(x.dtype)


def mean_over_all(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean() + EPSILON)).to(x.dtype)


def sum_not_divided(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, True) + EPSILON)).to(x.dtype)


def divided_by_another_size(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, True) / (WIDTH - 1) + EPSILON)).to(x.dtype)


def squares_of_another(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * ((wide + 1) * torch.rsqrt(wide.pow(2).mean(-1, True) + EPSILON)).to(x.dtype)


NOT_ROOTS = _named("root", {name: _of_means(root) for name, root in {
    "of_a_logarithm_and_epsilon": lambda v: torch.exp(-0.5 * (torch.log(v) + EPSILON)),
    "without_a_minus": lambda v: v**0.5,
    "by_a_logarithm_without_a_minus": lambda v: torch.exp(0.5 * torch.log(v)),
    "by_another_logarithm": lambda v: torch.exp2(-0.5 * torch.log(v)),
    "by_a_logarithm_and_epsilon_outside": lambda v: torch.exp(-0.5 * torch.log(v)) + EPSILON,
    "by_another_power": lambda v: (v**-0.5) ** 2,
    "without_an_inverse": lambda v: v.sqrt(),
}.items()})  # fmt: skip


def _products(x: Any, y: Any) -> Any:
    """Of each row and the row of the other."""
    return (x.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1).squeeze(-1)


NOT_SUMS = _named("sum", {name: _of_sums(total) for name, total in {
    "of_products_with_another": lambda x: _products(x, x + 1),
    "of_products_with_all_rows": lambda x: _products(x, x.sum(1, keepdim=True)),
    "with_rows_turned": lambda x: _products(x, x).t().reshape(2, 3),
    "with_signs": lambda x: (x * x.abs()).sum(-1),
    "by_numbers": lambda x: (x * x) @ torch.arange(WIDTH, device=x.device).float(),
    "by_all_but_the_last": lambda x: x.square().cumsum(-1)[..., -2],
    "of_magnitudes": lambda x: (x.abs() @ torch.ones(WIDTH, device=x.device)).square(),
    "of_pools_of_halves": lambda x: functional.avg_pool1d(x.square(), WIDTH // 2)[..., 0] * WIDTH,
}.items()})  # fmt: skip


def _by_ones(x: Any, number: float) -> Any:
    return (x * x) @ torch.full((WIDTH,), number, device=x.device)


NOT_MEANS = {_named("mean", {name: _of_sums(total)})[0]: reason for name, total, reason in (
    ("by_ones_that_are_added_up", lambda x: WIDTH * _by_ones(x, 1.0), "not divided by how many they are: the root is of 64 times"),
    ("by_parts_of_a_hundred", lambda x: WIDTH * _by_ones(x, 0.01), "the root is of 0.64 times their mean"),
    ("by_a_least_logarithm", lambda x: WIDTH * torch.exp(torch.log(x.square().mean(-1)).clamp(min=-2.0)), "another function of"),
)}  # fmt: skip


def epsilon_outside_products(x: Any, w: Any) -> Any:
    wide = x.float()
    mean = _products(wide, wide) / WIDTH
    return w * (wide * torch.reciprocal(mean.sqrt() + EPSILON).unsqueeze(-1)).to(x.dtype)


def products_of_columns(x: Any, w: Any) -> Any:
    wide = x.float()
    columns = wide.mT
    mean = _products(columns, columns).unsqueeze(1) / 3
    return w * (wide * torch.rsqrt(mean + EPSILON)).to(x.dtype)


def products_not_divided(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(_products(wide, wide) + EPSILON).unsqueeze(-1)).to(x.dtype)


def epsilon_from_a_tensor(x: Any, w: Any) -> Any:
    wide = x.float()
    return w * (wide * torch.rsqrt(w[0].float().abs() + wide.pow(2).mean(-1, True))).to(x.dtype)


_CALL = "the operator adds epsilon under the root; call torch.nn.functional.rms_norm, if rows near zero"
_OUTSIDE = _CALL.replace("epsilon", "it", 1)


def normalised_before_an_activation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The products behind the weight are the activation's."""
    normed = divided_by_its_length(x, weight)
    return normed * torch.sigmoid(1.7 * normed)


NOT_NORMS: dict[Callable[..., Any], str] = {
    epsilon_outside: f"epsilon is added to the root; {_OUTSIDE}",
    epsilon_and_a_length: f"epsilon is added to the root; {_OUTSIDE}",
    least_length: f"the root is at least 1e-05; {_CALL}",
    least_mean: f"the root is at least 0.00316; {_CALL}",
    mean_that_is_subtracted: "another function of the mean of its squares",
    divided_by_its_length: "not divided by how many",
    normalised_before_an_activation: "not divided by how many",
    mean_over_rows: "the mean is over the dimensions [1] of 3",
    mean_over_all: "the mean is over the dimensions [0, 1, 2] of 3",
    sum_not_divided: "not divided by how many",
    divided_by_another_size: "not divided by how many",
    squares_of_another: "which is not in the product",
    **dict.fromkeys(NOT_SUMS, ""),
    **dict.fromkeys(NOT_ROOTS, "another function of the mean of its squares"),
    NOT_ROOTS[0]: "the root is of 1.00001 times their mean",
    **NOT_MEANS,
    epsilon_outside_products: f"epsilon is added to the root; {_OUTSIDE}",
    products_of_columns: "",
    products_not_divided: "not divided by how many",
    epsilon_from_a_tensor: "and the operator takes a number",
}


NORM_SPECS = ((2, 3, WIDTH), (WIDTH,))
