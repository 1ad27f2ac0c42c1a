"""Spellings of constants, of products with a bias and of losses, and what nearly is one: functions by name, and their shapes."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

WIDTH = 64


def masked_by_constants(x: Any, w: Any) -> Any:
    """As `transformers` finds sequences that are packed in a row; the mask depends on no input."""
    rows = torch.arange(WIDTH, device=x.device)
    before = torch.cat((rows[:1] - 1, rows))
    sequence = (torch.diff(before) != 1).cumsum(-1)
    allowed = (sequence[:, None] == sequence[None]) & (rows[None] <= rows[:, None])
    numbers = (torch.full((), number, dtype=x.dtype, device=x.device) for number in (0.0, torch.finfo(x.dtype).min))
    added = torch.where(allowed, *numbers)
    return x[:, :1].transpose(1, 2) * w + added


def masked_by_sums_of_constants(x: Any, w: Any) -> Any:
    """As `transformers` 4.57 has it: a mask that is computed with the numbers of the dtype, none of which is rounded."""
    rows = torch.arange(WIDTH, device=x.device)
    most = torch.full((WIDTH, WIDTH), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
    masked = most.triu(1) * (rows > rows[:, None] - 1)
    masked[:] = masked.masked_fill(masked + torch.ones(WIDTH, device=x.device) == 0, torch.finfo(x.dtype).min)
    kept = ~torch.all(masked == torch.finfo(x.dtype).min, dim=-1, keepdim=True)
    kept = torch.tensor(1.0, dtype=x.dtype) - (1.0 - kept.to(x.dtype))
    counted = torch.ones(WIDTH, device=x.device).cumsum(0)
    return x[:, :1].transpose(1, 2) * w + masked.mul(kept) * (counted.long() > 0)


def constant_that_leaves(x: Any, w: Any) -> Any:
    return x * w, torch.arange(WIDTH, device=x.device)


def constant_that_is_written(x: Any, w: Any) -> Any:
    """The next call needs the numbers as they were."""
    rows = torch.arange(WIDTH, device=x.device)
    rows[0] += w[0].long()
    return x * rows


def computed_with_fractions(x: Any, w: Any) -> Any:
    return x * torch.exp(torch.arange(0, 1, 1 / WIDTH, device=x.device, dtype=x.dtype)) * w


def computed_by_rounding(x: Any, w: Any) -> Any:
    """Two of the three sums are none of the dtype's numbers."""
    tenths = torch.full((), 0.1, dtype=x.dtype, device=x.device) + torch.full((), 1 / 3, dtype=x.dtype, device=x.device)
    return x * tenths * w


def drawn_at_random(x: Any, w: Any) -> Any:
    return x * (torch.randint(0, 9, (WIDTH,), device=x.device) * 0 + 1) * w


NOT_CONSTANTS: dict[Callable[..., Any], str] = dict.fromkeys(
    (constant_that_leaves, computed_with_fractions, computed_by_rounding, drawn_at_random), ""
)


def biased(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b


def bias_first(x: Any, w: Any, b: Any) -> Any:
    return torch.add(b, torch.matmul(x, w))


def scaled_bias(x: Any, w: Any, b: Any) -> Any:
    return torch.add(x @ w, b, alpha=2)


def bias_in_float32(x: Any, w: Any, b: Any) -> Any:
    return x @ w + b.float()


def product_used_again(x: Any, w: Any, b: Any) -> Any:
    product = x @ w
    return product + b, product


def biased_einsum(x: Any, w: Any, b: Any) -> Any:
    return torch.einsum("bsd,dk->bsk", x, w) + b


def biased_tensordot(x: Any, w: Any, b: Any) -> Any:
    return b + torch.tensordot(x, w, dims=1)


def biased_product_with_a_row(x: Any, w: Any, b: Any) -> Any:
    """The matrix repeats one row."""
    return x @ w[0].expand(WIDTH, -1) + b


def biased_bmm(x: Any, w: Any, b: Any) -> Any:
    """With one weight for all matrices of a batch, as older code has it."""
    return torch.bmm(x, w.expand(x.shape[0], -1, -1)) + b


def biased_bmm_of_copies(x: Any, w: Any, b: Any) -> Any:
    return torch.add(b, torch.bmm(x, w[None].repeat(x.shape[0], 1, 1)))


BIASED = {
    biased: "reshape addmm", bias_first: "reshape addmm", biased_einsum: "permute permute permute permute reshape reshape addmm",
    biased_tensordot: "addmm",
    biased_product_with_a_row: "reshape addmm", biased_bmm: "reshape addmm", biased_bmm_of_copies: "reshape reshape addmm",
}  # fmt: skip


def biased_bmm_of_several_weights(x: Any, w: Any, b: Any) -> Any:
    return torch.bmm(x, torch.stack((w, w * 2))) + b


NOT_BIASED: dict[Callable[..., Any], str] = {
    biased_bmm_of_several_weights: "",
    scaled_bias: "or the bias is scaled",
    bias_in_float32: "product and bias are torch.float16, torch.float32",
    product_used_again: "nothing would be saved",
}


def scaled_and_added(x: Any, y: Any) -> Any:
    return x * -0.1875 + y


def scaled_and_subtracted(x: Any, y: Any) -> Any:
    return y - 0.5 * x


SCALED_SPECS = ((4, 24), (4, 24))
SCALED: tuple[Callable[..., Any], ...] = (scaled_and_added, scaled_and_subtracted)


def scaled_by_what_alpha_rounds(x: Any, y: Any) -> Any:
    return x * 0.1 + y


def subtracted_from_what_is_scaled(x: Any, y: Any) -> Any:
    return x * 0.5 - y


def scaled_product_used_again(x: Any, y: Any) -> Any:
    scaled = x * 0.5
    return (scaled + y) * scaled


NOT_SCALED: dict[Callable[..., Any], str] = {
    scaled_by_what_alpha_rounds: "", subtracted_from_what_is_scaled: "",
    scaled_product_used_again: "nothing would be saved",
}  # fmt: skip


def loss_of_a_language_model(x: Any, y: Any) -> Any:
    """As `transformers` has it."""
    return functional.cross_entropy(x.float(), y.argmax(-1), ignore_index=3)


def loss_of_each_row(x: Any, y: Any) -> Any:
    return functional.nll_loss(functional.log_softmax(x, -1), y.argmax(-1), reduction="none")


def loss_with_a_weight(x: Any, y: Any) -> Any:
    return functional.cross_entropy(x.float(), y.argmax(-1), y[0].abs().float(), reduction="sum")


def chosen_by_gather(x: Any, y: Any) -> Any:
    """As libraries of reinforcement learning have it: the logarithm of each token's probability, times minus one."""
    return -torch.log_softmax(x, -1).gather(1, y.argmax(-1, keepdim=True)).squeeze(1)


def mean_of_the_chosen(x: Any, y: Any) -> Any:
    return -functional.log_softmax(x.float(), 1).gather(-1, y.argmax(-1)[:, None]).mean()


def sum_of_what_is_minus_the_chosen(x: Any, y: Any) -> Any:
    return torch.sum(-functional.log_softmax(x.float(), -1).gather(-1, y.argmax(-1)[:, None])[:, 0])


def mean_of_the_logarithms(x: Any, y: Any) -> Any:
    """Without the minus, which stands behind the operator."""
    return functional.log_softmax(x, -1).gather(-1, y.argmax(-1, keepdim=True)).mean()


def chosen_in_sequences(x: Any, y: Any) -> Any:
    """Rows of several sequences, and a mask of some of them."""
    x, y = x.view(2, 3, 16), y.view(2, 3, 16).argmax(-1)
    return functional.log_softmax(x, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1).neg() * (y != 3)


def loss_of_positions(x: Any, y: Any) -> Any:
    """As language models are often trained and evaluated: torch wants classes before positions."""
    x, y = x.view(2, 3, 16), y.view(2, 3, 16).argmax(-1)
    return functional.cross_entropy(x.transpose(1, 2), y, ignore_index=3)


def loss_of_each_position(x: Any, y: Any) -> Any:
    x, y = x.float().view(2, 3, 16), y.view(2, 3, 16).argmax(-1)
    return functional.cross_entropy(x.permute(0, 2, 1).contiguous(), y, x[0, 0].abs(), reduction="none")


LOSS_SPECS = ((6, 16), (6, 16))
LOSSES: dict[Callable[..., Any], str] = {
    loss_of_positions: "argmax npu_cross_entropy_loss",
    loss_of_each_position: "_to_copy argmax abs npu_cross_entropy_loss",
    chosen_by_gather: "argmax npu_cross_entropy_loss", mean_of_the_chosen: "_to_copy argmax npu_cross_entropy_loss",
    sum_of_what_is_minus_the_chosen: "_to_copy argmax npu_cross_entropy_loss",
    mean_of_the_logarithms: "argmax npu_cross_entropy_loss neg",
    chosen_in_sequences: "argmax npu_cross_entropy_loss ne mul",
    loss_of_a_language_model: "_to_copy argmax npu_cross_entropy_loss", loss_of_each_row: "argmax npu_cross_entropy_loss",
    loss_with_a_weight: "_to_copy argmax abs _to_copy npu_cross_entropy_loss",
}  # fmt: skip


def logarithm_by_itself(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log(torch.softmax(x, -1)), y.argmax(-1))


def logarithm_that_is_chosen(x: Any, y: Any) -> Any:
    return -torch.softmax(x, -1).log().gather(1, y.argmax(-1, keepdim=True))


def chosen_over_the_rows(x: Any, y: Any) -> Any:
    return -torch.log_softmax(x, 0).gather(1, y.argmax(-1, keepdim=True))


def chosen_without_a_minus(x: Any, y: Any) -> Any:
    """A kernel for the minus is one too many."""
    return torch.log_softmax(x, -1).gather(1, y.argmax(-1, keepdim=True))


def two_of_each_row(x: Any, y: Any) -> Any:
    return -torch.log_softmax(x, -1).gather(1, y.argsort(-1)[:, :2])


def difference_from_a_sum_of_exponentials(x: Any, y: Any) -> Any:
    return (torch.logsumexp(x, -1) - x.gather(1, y.argmax(-1)[:, None])[:, 0]).mean()


def chosen_by_two_indices(x: Any, y: Any) -> Any:
    return -torch.log_softmax(x, -1)[y.argsort(0)[:, 0], y.argmax(-1)]


def classes_as_ones(x: Any, y: Any) -> Any:
    return -(functional.one_hot(y.argmax(-1), 16) * torch.log_softmax(x, -1)).sum(-1)


def softmax_over_the_rows(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log_softmax(x, 0), y.argmax(-1))


def classes_that_were_first(x: Any, y: Any) -> Any:
    return functional.cross_entropy(x.view(2, 16, 3), y.view(2, 16, 3).argmax(1))


def weight_of_half_precision(x: Any, y: Any) -> Any:
    """The device takes a weight in float32 alone."""
    return functional.cross_entropy(x, y.argmax(-1), y[0].abs())


def weight_in_another_dtype(x: Any, y: Any) -> Any:
    return functional.nll_loss(torch.log_softmax(x.float(), -1).to(x.dtype), y.argmax(-1), y[0].abs())


NOT_LOSSES: dict[Callable[..., Any], str] = {
    logarithm_that_is_chosen: "no logarithm of a softmax", chosen_over_the_rows: "not over the last dimension",
    chosen_without_a_minus: "nothing would be saved", difference_from_a_sum_of_exponentials: "the operator gives NaN",
    chosen_by_two_indices: "by indices of rows, too", classes_as_ones: "each class has a weight of its own",
    classes_that_were_first: "are not the last of dense logits",
    two_of_each_row: "", logarithm_by_itself: "no logarithm of a softmax", softmax_over_the_rows: "not over the second",
    weight_in_another_dtype: "logits, weight and loss are", weight_of_half_precision: "the operator takes torch.float32",
}  # fmt: skip


BIAS_SPECS = ((2, 3, WIDTH), (WIDTH, 40), (40,))
