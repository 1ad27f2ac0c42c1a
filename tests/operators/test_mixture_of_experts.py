"""Operators of a mixture of experts: values by hand, gradients by torch's own derivatives of the formulas in float64."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.versions import operator_schemas

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
EXPERTS = torch.tensor([[1, 0], [2, 1], [0, 3]], dtype=torch.int32)
"""The two experts of three tokens; in their order the choices are 1, 4 | 0, 3 | 2 | 5."""
TOKENS = torch.tensor([[1.0], [2.0], [3.0]])


def formula(name: str) -> Callable[..., Any]:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def doubles(*size: int) -> torch.Tensor:
    """Random float64 numbers whose gradient is wanted."""
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def ints(*values: Any) -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def test_gating_takes_the_best_experts_of_the_best_groups() -> None:
    """The group with the highest expert wins by maximum; the one with the higher two highest wins by sum."""
    gate, x = formula("npu_moe_gating_top_k"), torch.tensor([[0.0, 3.0, -9.0, 2.0, 2.5, -9.0]])
    for mode, experts in ((0, [1, 0]), (1, [4, 3])):
        y, chosen, norm = gate(x, 2, group_count=2, group_select_mode=mode, norm_type=1, out_flag=True)
        assert chosen.tolist() == [experts]
        weights = torch.sigmoid(x[0, experts])
        torch.testing.assert_close(y[0], weights / weights.sum())
        torch.testing.assert_close(norm, torch.sigmoid(x))


def test_gating_by_softmax_by_table_and_with_bias() -> None:
    """A bias moves the choice and not the weight; a table makes the choice; softmax weights are not normalised again."""
    gate, x = formula("npu_moe_gating_top_k"), torch.tensor([[0.0, 1.0, 2.0]])
    weights = torch.softmax(x, -1)
    y, chosen, norm = gate(x, 1, bias=torch.tensor([5.0, 0.0, 0.0]), routed_scaling_factor=2.0)
    assert chosen.tolist() == [[0]]
    torch.testing.assert_close(y, 2 * weights[:, :1])
    assert not norm.any()
    y, chosen, _ = gate(x, 2, input_ids=ints(1), tid2eid=ints([0, 1], [1, 0]))
    assert chosen.tolist() == [[1, 0]]
    torch.testing.assert_close(y, weights[:, [1, 0]])
    assert gate(torch.zeros(1, 4), 2)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("norm_type", [0, 1])
def test_gating_has_the_gradient_of_its_formula(norm_type: int) -> None:
    """The operator's gradient is that of torch, of the chosen weights by the scores before the norm."""
    x, grad = doubles(3, 5), torch.randn(3, 2, dtype=torch.float64)
    fixed = {"norm_type": norm_type, "routed_scaling_factor": 1.5, "eps": 0.1}
    y, chosen, norm = formula("npu_moe_gating_top_k")(x, 2, out_flag=True, **fixed)
    (expected,) = torch.autograd.grad(y, x, grad)
    found = formula("npu_moe_gating_top_k_backward")(norm.detach(), grad, chosen, **fixed)
    torch.testing.assert_close(found, expected)


def test_gating_softmax_before_and_behind_the_choice() -> None:
    """Behind it the weights of the chosen ones add up to 1; a finished token has no expert."""
    gate, x = formula("npu_moe_gating_top_k_softmax_v2"), torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    y, chosen, weights = gate(x, k=2, output_softmax=True, finished=torch.tensor([False, True]))
    torch.testing.assert_close(weights, torch.softmax(x, -1))
    torch.testing.assert_close(y[0], weights[0, [1, 2]])
    assert chosen.tolist() == [[1, 2], [3, 3]]
    y, chosen, nothing = gate(x, k=2, renorm=1, output_softmax=True)
    torch.testing.assert_close(y, torch.softmax(torch.tensor([[2.0, 1.0], [1.0, 1.0]]), -1))
    assert (chosen.tolist(), nothing.numel()) == ([[1, 2], [0, 1]], 0)
    with pytest.raises(UnsupportedArgumentError, match="output_softmax"):
        gate(x.unsqueeze(0), k=2, output_softmax=True)


def test_routing_copies_tokens_in_the_order_of_the_experts() -> None:
    """Rows count down the columns in the first form; active_num limits the copies."""
    rows = ints([0, 3], [1, 4], [2, 5])
    copies, places, experts = formula("npu_moe_init_routing")(TOKENS, rows, EXPERTS, 2)
    assert copies.flatten().tolist() == [1, 3, 1, 2]
    assert places.tolist() == [2, 4, 1, 0, 3, 5]
    assert experts.tolist() == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(("kind", "expected"), [(0, [2, 3]), (1, [2, 1]), (2, [[1, 2], [2, 1], [0, 0], [0, 0]])])
def test_routing_of_some_experts(kind: int, expected: list[Any]) -> None:
    """Choices out of the range have no row; each form of the counts, each form of the index, and the tokens' scales."""
    route = functools.partial(
        formula("npu_moe_init_routing_v2"), TOKENS, EXPERTS, scale=torch.tensor([10.0, 20.0, 30.0]), expert_num=4,
        active_expert_range=[1, 3], expert_tokens_num_flag=True, expert_tokens_num_type=kind,
    )  # fmt: skip
    copies, places, tokens, scales = route()
    assert copies.flatten().tolist() == [1, 2, 2, 0, 0, 0]
    assert places.tolist() == [0, -1, 2, 1, -1, -1]
    assert tokens.tolist() == expected
    assert scales.tolist() == [10, 20, 20, 0, 0, 0]
    assert route(row_idx_type=1)[1].tolist()[:3] == [0, 3, 2]
    assert route(active_num=2)[0].flatten().tolist() == [1, 2]


def test_routing_with_capacity_drops_and_pads() -> None:
    """Each expert has one row: its first choice; the scales go along."""
    copies, places, tokens, scales = formula("npu_moe_init_routing_v2")(
        TOKENS, EXPERTS[:, :1], scale=torch.tensor([10.0, 20.0, 30.0]), expert_num=4, expert_capacity=1,
        drop_pad_mode=1, expert_tokens_num_flag=True, expert_tokens_num_type=1,
    )  # fmt: skip
    assert copies.flatten().tolist() == [3, 1, 2, 0]
    assert places.tolist() == [1, 2, 0]
    assert tokens.tolist() == [1, 1, 1, 0]
    assert scales.tolist() == [30, 10, 20, 0]
    both = formula("npu_moe_init_routing_quant")(
        TOKENS, EXPERTS, expert_num=4, expert_capacity=1, drop_pad_mode=1, expert_tokens_before_capacity_flag=True
    )
    assert both[0].flatten().tolist() == [127, 127, 127, 127]
    assert both[1].tolist() == [1, 0, 2, -1, -1, 3]
    assert both[2] is None
    assert both[3].tolist() == [2, 2, 1, 1]


def test_routing_quantises() -> None:
    """Statically by scale and offset, dynamically by each row's maximum, with each expert's smoothing, and to int4."""
    x = torch.tensor([[1.0, -2.0], [4.0, 3.0]])
    experts = ints([1], [0])
    route = functools.partial(formula("npu_moe_init_routing_v2"), x, experts, expert_num=2)
    fixed = {"scale": torch.tensor([10.0]), "offset": torch.tensor([1.0])}
    assert route(quant_mode=0, **fixed)[0].tolist() == [[41, 31], [11, -19]]
    quant = functools.partial(formula("npu_moe_init_routing_quant"), x, experts, expert_num=2, expert_tokens_num_mode=1)
    assert quant(quant_mode=0, **fixed)[0].tolist() == [[41, 31], [11, -19]]
    for values, scales in (route(quant_mode=1)[::3], quant()[::4]):
        assert values.tolist() == [[127, 95], [64, -127]]
        torch.testing.assert_close(scales, torch.tensor([4.0, 2.0]) / 127)
    assert quant()[2].tolist() == [1, 2]
    smooth = torch.tensor([[1.0, 2.0], [4.0, 1.0]])
    assert route(quant_mode=1, scale=smooth)[0].tolist() == [[85, 127], [127, -64]]
    wide = torch.tensor([[1.0, -7.0], [14.0, 11.0]])
    packed, _, _, scales = formula("npu_moe_init_routing_v2")(wide, experts, expert_num=2, quant_mode=13)
    assert packed.tolist() == [[7 + (6 << 4)], [1 + (9 << 4)]]
    assert scales.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("mode", "number", "first", "scale"),
    [
        (3, 480.0, 240.0, [2.0, 0.0]),
        (3, 448.25, 448.0, [1.0, 0.0]),
        (16, 1e-6, 512.0, [2.0**-29] * 2),
        (6, 1.0, 8, None),
        (6, 60000.0, 0x6F, None),
        (7, 60000.0, 0x6E, None),
        (8, 1.0, 0x6E, 2.0**-15),
        (9, 7.0, 0x07, [[1.0, 0.0]]),
        (11, 7.0, 57344.0, [[7 / 57344, 0.0]]),
        (12, 1e-40, 448.0, [[0.0, 0.0]]),
    ],
)
def test_routing_to_floats(mode: int, number: float, first: float, scale: Any) -> None:
    """Powers of two up and down, float16 cut to bfloat16, the least maximum, infinity and saturation; one row stays free."""
    x = torch.zeros(2, 64)
    x[0, 0] = number
    x = x if number == 1e-40 else x.half() if number == 448.25 else x
    values, _, _, scales = formula("npu_moe_init_routing_v2")(
        x, ints([1], [0]), expert_num=2, active_expert_range=[1, 2], quant_mode=mode, scale=torch.tensor([2.0])
    )
    assert values[:, 0].tolist() == [first, 0]
    assert not values[1].view(torch.uint8).any()
    if scale is not None:
        torch.testing.assert_close(scales[0].float(), torch.tensor(scale), atol=2.0**-127, rtol=1e-7)
        assert not scales[1:].view(torch.uint8).any()


def test_floats_move_without_quantisation() -> None:
    """Tokens of 8-bit and 4-bit floats, and the scales of their blocks, as they are."""
    route = functools.partial(formula("npu_moe_init_routing_v2"), expert_idx=ints([1], [0]), expert_num=2)
    powers = torch.tensor([[[1, 2]], [[3, 4]]]).to(torch.uint8).view(torch.float8_e8m0fnu)
    values, _, _, scales = route(torch.tensor([[1.0], [2.0]]).to(torch.float8_e5m2), scale=powers)
    assert (values.tolist(), scales.view(torch.uint8).tolist()) == ([[2.0], [1.0]], [[[3, 4]], [[1, 2]]])
    for code, none in ((296, torch.float8_e8m0fnu), (290, torch.float32)):
        values, _, _, scales = route(torch.tensor([[7], [9]], dtype=torch.uint8), x_dtype=code)
        assert (values.tolist(), scales.dtype) == ([[9], [7]], none)
    for wrong in ({"quant_mode": 10}, {"quant_mode": 3, "drop_pad_mode": 1}, {"x_dtype": 1}):
        with pytest.raises(UnsupportedArgumentError, match=f"does not cover {[*wrong][-1]}="):
            route(TOKENS[:2], **wrong)


def test_finalising_adds_up_what_the_experts_made() -> None:
    """By column and by row, with weights, biases and residuals; a dropped choice counts as zeros, its bias does not."""
    finalise = formula("npu_moe_finalize_routing")
    rows, scales, bias = torch.tensor([[1.0], [2.0], [4.0], [8.0]]), torch.tensor([[1.0, 10.0], [1.0, 10.0]]), TOKENS
    experts, skip = ints([0, 1], [2, 0]), torch.tensor([[100.0], [200.0]])
    places = ints(3, 0, 1, 2)
    assert finalise(rows, None, None, None, scales, places, experts).flatten().tolist() == [8 + 20, 1 + 40]
    assert finalise(rows, None, None, None, scales, places, experts, 2).flatten().tolist() == [8 + 10, 2 + 40]
    whole = finalise(rows, skip, skip, bias, scales, places, experts)
    assert whole.flatten().tolist() == [200 + 9 + 40, 400 + 4 + 50]
    dropped = finalise(rows.reshape(2, 2, 1), None, None, bias, scales, ints(-1, 0, 1, 2), experts, 1)
    assert dropped.flatten().tolist() == [1 + 40, 4 + 50]
    assert finalise(rows, None, None, None, None, places, None, 0, 2).flatten().tolist() == [10, 5]


def test_re_routing_goes_from_ranks_to_experts() -> None:
    """Two ranks with two experts: the first expert's tokens of both ranks come first."""
    numbers = torch.tensor([[1, 2], [2, 0]])
    tokens = torch.arange(5.0).unsqueeze(1)
    moved, scales, index, counts = formula("npu_moe_re_routing")(tokens, numbers, per_token_scales=torch.arange(5.0))
    assert moved.flatten().tolist() == scales.tolist() == index.tolist() == [0, 3, 4, 1, 2]
    assert counts.tolist() == [3, 2]


def test_experts_are_found_and_replaced() -> None:
    """Ends of the experts' rows; copies by rank and by token; weak choices pruned, inactive tokens too."""
    assert formula("npu_moe_compute_expert_tokens")(ints(0, 0, 2, 4), 4).tolist() == [2, 2, 3, 3]
    update, table = formula("npu_moe_update_expert"), ints([2, 5, 1], [1, 4, 0])
    ids = ints([0, 1], [0, 1], [1, 0])
    assert update(ids, table, local_rank_id=0, world_size=2)[0].tolist() == [[5, 4], [5, 4], [4, 5]]
    assert update(ids, table, local_rank_id=1, world_size=2)[0].tolist() == [[1, 4], [1, 4], [4, 1]]
    scales = torch.tensor([[0.75, 0.25], [0.875, 0.125], [0.5, 0.5]])
    found, mask = update(
        ids, table, expert_scales=scales, pruning_threshold=torch.tensor([0.0, 0.2]),
        active_mask=torch.tensor([True, True, False]), balance_mode=1,
    )  # fmt: skip
    assert found.tolist() == [[5, 4], [1, 4], [4, 5]]
    assert mask.tolist() == [[True, True], [True, False], [False, False]]


@pytest.mark.parametrize("limit", [None, 4, -1])
def test_permutation_and_its_inverse_have_torchs_gradients(limit: int | None) -> None:
    """Permuted and weighted back a token is itself as far as its rows were kept; gradients are those of the formulas."""
    tokens, probs = doubles(3, 4), torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    permuted, index = formula("npu_moe_token_permute")(tokens, EXPERTS, limit)
    assert index.tolist() == [2, 0, 4, 3, 1, 5]
    kept = (index < permuted.shape[0]).reshape(3, 2)
    back = formula("npu_moe_token_unpermute")(permuted, index, probs)
    torch.testing.assert_close(back, tokens * (probs * kept).sum(-1, keepdim=True))

    grad = torch.randn_like(back)
    to_tokens, to_probs, to_rows = torch.autograd.grad(back, (tokens, probs, permuted), grad)
    rows = permuted.detach()
    found = formula("npu_moe_token_unpermute_grad")(rows, grad, index, probs)
    also = formula("npu_moe_token_unpermute_grad_v2")(
        grad, index, rows.shape[0], torch.float64, probs, permuted_tokens=rows
    )
    for one, other in (found, also):
        torch.testing.assert_close(one, to_rows)
        torch.testing.assert_close(other, to_probs)
    torch.testing.assert_close(formula("npu_moe_token_permute_grad")(tokens, to_rows, EXPERTS, index), to_tokens)
    last = formula("npu_moe_token_permute_grad_v2")(to_rows, index, 3, torch.float64, 2)
    torch.testing.assert_close(last, to_tokens)


@pytest.mark.parametrize("pad", [False, True])
def test_permutation_by_a_map_has_torchs_gradients(pad: bool) -> None:
    """As above with a map of three tokens and three experts; with padding, expert 2 has a free row, which takes token 0."""
    marks = torch.tensor([[True, True, False], [True, False, True], [False, True, True]])
    tokens, probs = doubles(3, 4), doubles(3, 3)
    permuted, weights, index = formula("npu_moe_token_permute_with_routing_map")(
        tokens, marks, probs=probs, num_out_tokens=6, drop_and_pad=pad
    )
    assert index.tolist() == ([0, 1, 0, 2, 1, 2] if pad else [0, 2, 1, 4, 3, 5])
    sources = [0, 1, 0, 2, 1, 2]
    torch.testing.assert_close(permuted, tokens[sources])
    torch.testing.assert_close(weights, probs[sources, [0, 0, 1, 1, 2, 2]])
    grads = torch.randn_like(permuted), torch.randn_like(weights)
    expected = torch.autograd.grad((permuted, weights), (tokens, probs), grads, retain_graph=True)
    found = formula("npu_moe_token_permute_with_routing_map_grad")(*grads, index, marks, 3, 3, pad)
    torch.testing.assert_close(found, expected)

    rows = permuted.detach().requires_grad_()
    back, order, ids, used = formula("_npu_moe_token_unpermute_with_routing_map")(
        rows, index, [3, 4], probs=probs, routing_map=marks, drop_and_pad=pad
    )
    torch.testing.assert_close(back, tokens * (probs * marks).sum(-1, keepdim=True))
    grad = torch.randn_like(back)
    expected = torch.autograd.grad(back, (rows, probs), grad)
    saved = (order, ids) if pad else (index, index)
    found = formula("npu_moe_token_unpermute_with_routing_map_grad")(
        grad, *saved, marks, rows.detach(), probs, pad, [3, 4]
    )
    torch.testing.assert_close(found, expected)
    assert used.numel() == 6


def test_gradients_on_the_device() -> None:
    """``backward`` of a program with a permutation and its inverse calls the gradient operators; they give torch's gradients."""
    tokens, probs = torch.randn(3, 4), torch.rand(3, 2)
    on_device = [value.npu().requires_grad_() for value in (tokens, probs)]
    rows, index = torch.ops.npu.npu_moe_token_permute(on_device[0], EXPERTS.npu())
    out = torch.ops.npu.npu_moe_token_unpermute(rows * 2, index, on_device[1])
    out.square().sum().backward()
    expected = [value.requires_grad_() for value in (tokens, probs)]
    (2 * expected[0] * expected[1].sum(-1, keepdim=True)).square().sum().backward()
    for found, reference in zip(on_device, expected, strict=True):
        torch.testing.assert_close(found.grad.cpu(), reference.grad)


@pytest.mark.skipif(operator_schemas.DIFFERENCE.older, reason=operator_schemas.DIFFERENCE.what)
def test_an_argument_that_the_device_returns_is_returned() -> None:
    """The rows that are kept for the gradient are the argument itself, not a second copy in the device's memory."""
    rows = torch.randn(6, 4).npu()
    _, kept = torch.ops.npu._npu_moe_token_unpermute(rows, ints(2, 0, 4, 3, 1, 5).npu(), torch.rand(3, 2).npu())
    assert kept.data_ptr() == rows.data_ptr()


def _context_of(
    common: tuple[int, ...], returned: torch.Tensor, sent: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """The structure of workers that run apart, with the addresses of these buffers; the second micro batch is the one at work."""
    context = bytearray(1024)
    struct.pack_into("<6I", context, 0, *common)
    struct.pack_into("<4QI", context, 256, 0, 0, returned.data_ptr(), returned.numel() * returned.itemsize, 1)
    struct.pack_into(
        "<5Q", context, 384, sent.data_ptr(), sent.numel() * 4, rows.data_ptr(), rows.numel() * rows.itemsize, 1
    )
    return torch.frombuffer(context, dtype=torch.int8)


def test_workers_of_attention_and_of_experts_that_run_apart() -> None:
    """Two sessions and micro batches, three tokens with two choices: rows by expert, one of none, and what came back added up."""
    sessions, batches, tokens, choices, width = 2, 2, 3, 2, 256
    returned = torch.randn(batches, tokens, choices, width).half()
    experts = torch.tensor([[[0] * 6, [1, 0, 9, 1, 0, 0]], [[0] * 6, [0, 1, 1, 1, 0, 9]]], dtype=torch.int32)
    sent = torch.cat((torch.ones(sessions, batches, 2, dtype=torch.int32), experts), -1)
    rows = torch.randint(-9, 9, (sessions, batches, tokens, choices, width + 4), dtype=torch.int8)
    scales = torch.rand(sessions, batches, tokens, choices, 1)
    rows[..., width:] = scales.view(torch.int8)
    context = _context_of((sessions, batches, tokens, choices, 2, width + 4), returned, sent, rows)
    combine, batch = (
        OPERATORS[f"npu::npu_{name}"].formula for name in ("attention_worker_combine", "ffn_worker_batching")
    )
    shares = torch.rand(tokens, 1)
    y, following = combine(context, shares, torch.tensor([4], dtype=torch.int32), width)
    assert torch.equal(y, (returned[1, :, 0].float() * shares + returned[1, :, 1].float()).half())
    assert following.tolist() == [5]
    shape = [sessions, tokens, choices, width]
    y, groups, *places, of_rows, count = batch(context, 2, shape, token_dtype=2, need_schedule=1)
    flat = experts[:, 1].flatten()
    order = [place for expert in (0, 1) for place in range(12) if flat[place] == expert]
    assert (groups.tolist(), count.tolist()) == ([[0, 5], [1, 5]], [10])
    where = [(place // 6, 1, place % 6 // 2, place % 2) for place in order]
    assert [*zip(*(place[:10].tolist() for place in places), strict=True)] == where
    assert torch.equal(y[:10], torch.stack([rows[index][:width] for index in where]))
    assert torch.equal(of_rows[:10], torch.stack([scales[index][0] for index in where]))
    assert not y[10:].any()
    sent[1, 1, 0] = 0
    with pytest.raises(UnsupportedArgumentError, match="need_schedule"):
        batch(context, 2, shape, token_dtype=2, need_schedule=1)
    with pytest.raises(RuntimeError, match="bytes"):
        combine(context, shares, torch.tensor([4]), 2 * width)
