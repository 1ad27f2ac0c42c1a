"""Marks of unwritten memory follow the operators that only move elements: partial writes and copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import channel_shuffle, embedding, embedding_bag, pad, pixel_shuffle, pixel_unshuffle

from npu_emulator import check_memory, detect_races, register_kernel, schedule

Move = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

COUNT = 16
PARTIAL_WRITES: dict[str, Move] = {
    "index_copy_": lambda x, i: x.index_copy_(0, i, x.new_ones(len(i))),
    "index_copy": lambda x, i: x.index_copy(0, i, x.new_ones(len(i))),
    "index_fill_": lambda x, i: x.index_fill_(0, i, 2.0),
    "index_put_": lambda x, i: x.index_put_((i,), x.new_ones(())),
    "index_put": lambda x, i: x.index_put((i,), torch.tensor(2.0)),
    "index_put_ of a mask": lambda x, i: x.index_put_((mask(x, i),), x.new_ones(len(i))),
    "scatter_": lambda x, i: x.scatter_(0, i, 1.0),
    "scatter": lambda x, i: x.scatter(0, i, torch.ones_like(x)),
    "scatter_reduce_": lambda x, i: x.scatter_reduce_(0, i, torch.ones_like(x), "mean", include_self=False),
    "masked_fill_": lambda x, i: x.masked_fill_(mask(x, i), 1.0),
    "masked_fill": lambda x, i: x.masked_fill(mask(x, i), x.new_ones(())),
    "masked_scatter_": lambda x, i: x.masked_scatter_(mask(x, i), torch.ones_like(x)),
    "put_": lambda x, i: x.put_(i - COUNT, x.new_ones(len(i))),
    "as another dtype": lambda x, i: x.view(torch.int32).index_fill_(0, i, 2).view(torch.float32),
}
"""Each writes the elements `i` of `x`."""


def every(x: torch.Tensor) -> torch.Tensor:
    """The places of all elements."""
    return torch.arange(COUNT, device=x.device)


def mask(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """True at the places `i`."""
    return torch.zeros_like(x).index_fill(0, i, 1) > 0


@pytest.mark.parametrize("name", PARTIAL_WRITES)
def test_a_partial_write_leaves_the_rest_unwritten(name: str) -> None:
    """To compute on the rest is a fault of so many bytes; without a rest, and before the rest is read, there is none."""
    write = PARTIAL_WRITES[name]
    few, all_ = torch.tensor([1, 5], device="npu"), torch.arange(COUNT, device="npu")
    with check_memory() as faults:
        write(torch.empty(COUNT, device="npu"), all_).add(1).cpu()
        y = write(torch.empty(COUNT, device="npu"), few)
        y[1::4][:2].add(1).cpu()
        assert faults == []
        y.add(1).cpu()
    assert [(fault.operator, fault.bytes) for fault in faults] == [("aten.add.Tensor", 4 * (COUNT - 2))]


def test_a_diagonal_leaves_the_rest_unwritten() -> None:
    """`fill_diagonal_` writes the diagonal alone."""
    with check_memory() as faults:
        x = torch.empty(4, 4, device="npu").fill_diagonal_(1)
        x.diagonal().sum().cpu()
        x.sum().cpu()
    assert [fault.bytes for fault in faults] == [48]


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: torch.cat([x, torch.zeros(2, device="npu")]),
        lambda x: torch.stack([x, x]),
        lambda x: x.repeat(2),
        lambda x: x.flip(0).flip(0),
        lambda x: x.roll(2).roll(-2),
        lambda x: x.repeat_interleave(2),
        lambda x: pixel_unshuffle(pixel_shuffle(x.view(1, 4, 2, 2), 2), 2).view(COUNT),
        lambda x: channel_shuffle(channel_shuffle(x.view(1, 4, 2, 2), 2), 2).view(COUNT),
        lambda x: pad(x[None], (0, 3), mode="reflect"),
        lambda x: pad(x.view(1, 4, 4), (0, 0, 0, 2), mode="replicate").view(-1),
        lambda x: pad(x, (0, 3), value=2.0),
        lambda x: torch.cat([x, x], out=torch.empty(2 * COUNT, device="npu")),
        lambda x: (y := torch.empty_like(x), torch._foreach_copy_([y], [x]))[0],
        lambda x: x.clone(),
        lambda x: torch.where(every(x) < COUNT, x, 0.0),
        lambda x: torch.where(every(x) < 0, x.new_zeros(COUNT), x, out=torch.empty_like(x)),
        lambda x: x[every(x)],
        lambda x: x[every(x) < COUNT],
        lambda x: x.masked_select(every(x) < COUNT),
        lambda x: x.view(4, 4)[:, every(x)[:4]].view(COUNT),
        lambda x: x.index_select(0, every(x)),
        lambda x: x.gather(0, every(x)),
        lambda x: x.take(every(x)),
        lambda x: embedding(every(x), x.view(COUNT, 1)).view(COUNT),
        lambda x: torch.empty_like(x).scatter_(0, torch.arange(COUNT, device="npu"), x),
    ],
)
def test_a_copy_is_no_read(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A copy of a buffer that is written in part is no fault, nor is its written part; its unwritten part is."""
    with check_memory() as faults:
        x = torch.empty(COUNT, device="npu")
        x[:3] = 1
        y = copy(x)
        y[..., :3].add(1).cpu()
        assert faults == []
        y.sum().cpu()
    assert [fault.operator for fault in faults] == ["aten.sum.default"]


def test_what_a_move_reads() -> None:
    """Indices, masks and what is added must be written; an addition leaves what it adds to as it was."""
    with check_memory() as faults:
        x = torch.empty(4, device="npu")
        x[:2] = 0
        i = torch.arange(2, device="npu")
        x.index_add_(0, i, torch.ones(2, device="npu"))
        x.index_put_((i + 1,), torch.ones(2, device="npu"), accumulate=True)
        assert x[:2].tolist() == [1, 2]
        assert faults == []
        (x + 1).cpu()
        half = torch.zeros(4, dtype=torch.bool, device="npu")
        unknown = torch.empty(4, device="npu")
        unknown[:1] = 0
        torch.zeros(4, device="npu").masked_fill_(torch.cat([half[:2], torch.empty_like(half[:2])]), 1)
        torch.zeros(4, device="npu").scatter_add_(0, torch.zeros(4, dtype=torch.int64, device="npu"), unknown)
    assert [(fault.operator, fault.bytes) for fault in faults] == [
        ("aten.add.Tensor", 8),
        ("aten.masked_fill_.Scalar", 2),
        ("aten.scatter_add_.default", 12),
    ]


def test_a_fault_is_where_the_first_unwritten_byte_is() -> None:
    """Not where the tensor begins."""
    with check_memory() as faults:
        x = torch.empty(4, 8, device="npu")
        x[:, :3] = 1
        x[:, 1:5].add(1).cpu()
    assert [(fault.address, fault.bytes) for fault in faults] == [(x.data_ptr() + 12, 32)]


@pytest.mark.parametrize("written", [0, 3])
def test_copies_of_the_runtime_move_marks(written: int) -> None:
    """As those are by which a compiled function takes its inputs: what it computes with is no less unwritten."""
    torch.compiler.reset()  # a capture from outside the block is not watched
    compiled = torch.compile(lambda x: x[:8] + 1, backend="npugraph_ex")
    with check_memory() as faults:
        compiled(torch.ones(COUNT, device="npu"))
        assert faults == []
        x = torch.empty(COUNT, device="npu")
        x[:written] = 1
        x[8:] = 1
        compiled(x)
        torch.npu.synchronize()
    assert [(fault.operator, fault.bytes) for fault in faults] == [("aten.add.Tensor", (8 - written) * 4)]


@pytest.mark.parametrize("order", ["fifo", "lazy"])
def test_each_replay_moves_marks(order: str) -> None:
    """A cache that replays fill row by row is unwritten where no replay has written."""
    with schedule(order), check_memory() as faults:
        cache, rows = torch.empty(6, 2, device="npu"), torch.zeros(2, dtype=torch.int64, device="npu")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            new = torch.cat([torch.empty(1, 2, device="npu").fill_(1), torch.ones(1, 2, device="npu")])
            cache.index_copy_(0, rows, new)
        for first in (0, 2):
            rows.copy_(torch.tensor([first, first + 1]))
            graph.replay()
        assert cache[:4].sum().item() == 8
        assert faults == []
        cache.sum().item()
        assert [fault.bytes for fault in faults] == [16]
        rows.copy_(torch.tensor([4, 5]))
        graph.replay()
        assert cache.mean().item() == 1
        assert len(faults) == 1


def test_caches_that_operators_fill_and_read_in_part() -> None:
    """Cache writers keep what they do not write, and a program's own operator may read as much as it is given lengths for."""
    import torch_npu

    torch.library.define("moved_marks::first", "(Tensor cache, int length) -> Tensor")
    torch.library.register_fake("moved_marks::first", lambda cache, length: cache.new_empty(length))
    register_kernel("moved_marks::first", lambda cache, length: cache[:length, 0].clone())
    with check_memory() as faults:
        cache = torch.empty(8, 4, device="npu")
        cache.index_copy_(0, torch.tensor([0], device="npu"), torch.ones(1, 4, device="npu"))
        assert torch.ops.moved_marks.first(cache, 1).item() == 1
        rows = torch.tensor([[1], [2]], device="npu")
        torch_npu.npu_scatter_nd_update_(cache, rows, torch.ones(2, 4, device="npu"))
        assert cache[:3].sum().item() == 12
        caches = [torch.empty(2, 1, 7, size, dtype=torch.half, device="npu") for size in (32, 64)]
        for each in caches:
            each.index_fill_(2, torch.tensor([0], device="npu"), 0)
        kv, cos = (torch.ones(2, 1, 3, size, dtype=torch.half, device="npu") for size in (96, 32))
        gamma, places = kv[0, 0, 0, :64], torch.tensor([[1, 2, 3], [6, 5, 0]], device="npu")
        torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, cos, places, *caches, cache_mode="Norm")
        torch.npu.synchronize()
        assert faults == []
        torch.ops.moved_marks.first(torch.empty(8, 4, device="npu"), 1).cpu()
    assert [fault.operator for fault in faults] == ["moved_marks.first.default"]


@pytest.mark.parametrize(
    "product",
    [
        lambda x, a: torch.addmm(x, a, a, beta=0),
        lambda x, a: x.addmm_(a, a, beta=0),
        lambda x, a: torch.addmm(x, a, a, beta=0.0, out=torch.empty_like(a)),
        lambda x, a: torch.baddbmm(x[None], a[None], a[None], beta=0, alpha=0.5),
        lambda x, a: torch.addbmm(x, a[None], a[None], beta=0),
        lambda x, a: torch.addmv(x[0], a, a[0], beta=0),
        lambda x, a: torch.addr(x, a[0], a[0], beta=0),
    ],
)
def test_what_a_factor_of_zero_ignores(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Is not read: neither unwritten memory nor a race. As a factor of the product the same tensor is."""
    a, side = torch.ones(4, 4, device="npu"), torch.npu.Stream()
    with check_memory() as faults:
        assert product(torch.empty(4, 4, device="npu"), a).isfinite().all()
        assert faults == []
        x = torch.empty(4, 4, device="npu")
        torch.addmm(x, x, a, beta=0).cpu()
    assert [fault.operator for fault in faults] == ["aten.addmm.default"]
    x = torch.zeros(4, 4, device="npu")
    torch.npu.synchronize()
    with detect_races() as races:
        with torch.npu.stream(side):
            y = x + 1
        product(x, a)
        torch.npu.synchronize()
    assert bool(races) == (product(x, a).data_ptr() == x.data_ptr()), y


def moves(draw: random.Random, device: str) -> list[Move]:
    """Operators on two 6 by 6 tensors, with the indices that `draw` draws; each returns such a tensor."""

    def at(count: int) -> torch.Tensor:
        return torch.tensor([place - 6 * draw.randint(0, 1) for place in draw.sample(range(6), count)], device=device)

    def up(count: int) -> torch.Tensor:
        return at(count) % 6

    i, j, rows, places = at(3), at(3), up(3), up(4)
    chosen = torch.tensor([draw.random() < 0.4 for _ in range(6)], device=device)
    cut = draw.randint(0, 6)
    ones = torch.ones(3, 6, device=device)
    return [
        lambda x, y: x.index_copy_(0, rows, y[:3].to(x.dtype)),
        lambda x, y: x.t().index_copy_(0, rows, y[1::2].to(x.dtype)).t(),
        lambda x, y: x.index_put_((i,), y[0].to(x.dtype)),
        lambda x, y: x.__setitem__((slice(None), j), y[:, 3:].to(x.dtype)) or x,
        lambda x, y: x.index_put((i, j), y[2, ::2].to(x.dtype)),
        lambda x, _: x.index_put_((i, j), torch.tensor(2.0, dtype=x.dtype, device=device), accumulate=True),
        lambda x, _: x.index_put_((chosen,), torch.tensor(3.0, dtype=x.dtype, device=device)),
        lambda x, _: x.masked_fill_(chosen[:, None], 1.0),
        lambda x, _: x.t().masked_fill(chosen[:, None], torch.tensor(1.0)),
        lambda x, y: x.masked_scatter_(chosen, y.to(x.dtype).contiguous()),
        lambda x, _: x[::2].index_fill_(1, places, 4.0) is x or x,
        lambda x, y: x.scatter_(1, places.repeat(6, 1), y.to(x.dtype)),
        lambda x, _: x.scatter(0, rows[:, None].repeat(1, 6), 7.0),
        lambda x, _: x.scatter_reduce_(0, rows[:, None].repeat(1, 6), ones.to(x.dtype), "amax", include_self=False),
        lambda x, _: x.index_add(0, rows, ones.to(x.dtype)),
        lambda x, _: x.put_(i, torch.ones(3, dtype=x.dtype, device=device)),
        lambda x, y: torch.cat([x[:cut].to(torch.float64), y.to(torch.float64)[cut:]]).to(x.dtype),
        lambda x, y: torch.stack([x, y.to(x.dtype)], 2).view(6, 2, 6).flip(1)[:, 0],
        lambda x, _: x.repeat(2, 1)[cut : cut + 6],
        lambda x, _: x.roll((cut, 1), (0, 1)),
        lambda x, y: torch.where(chosen[:, None], x, y.to(x.dtype)),
        lambda x, _: torch.where(chosen, 6.0, x),
        lambda x, _: x[:, chosen].repeat(1, 6)[:, :6] if int(chosen.sum()) else x,
        lambda x, _: x[torch.cat([i, j])],
        lambda x, _: x.t().index_select(0, torch.cat([rows, rows])),
        lambda x, _: x.gather(0, torch.cat([rows, rows])[:, None].repeat(1, 6)),
        lambda x, _: x.repeat_interleave(2, 0)[cut : cut + 6],
        lambda x, _: channel_shuffle(x.view(1, 6, 3, 2), 3).view(6, 6),
        lambda x, _: pad(x[1:], (0, 0, 1, 0), value=2.0),
        lambda x, _: pad(x[None, 2:], (0, 0, 1, 1), mode=draw.choice(["reflect", "replicate"]))[0],
        lambda x, y: x.copy_(y.t()),
        lambda x, _: x.fill_diagonal_(5),
        lambda x, _: x.tril(cut - 3),
        lambda x, y: torch.slice_scatter(x, y[:2].to(x.dtype), 0, 2, 4),
        lambda x, _: x[0, 0].fill_(1) is x or x,
    ]


@pytest.mark.parametrize("seed", range(40))
def test_random_moves(seed: int) -> None:
    """After a sequence of moves as many bytes are unwritten as elements, on the host, are the NaN that was there first."""

    def run(device: str) -> list[torch.Tensor]:
        draw = random.Random(seed)
        made = []
        for dtype in draw.choices([torch.float32, torch.float16, torch.float64], k=2):
            empty = torch.empty(6, 6, dtype=dtype, device=device)
            made.append(empty.fill_(torch.nan) if device == "cpu" else empty)
            made[-1][draw.randint(1, 4) :, 1:] = 1
        for _ in range(6):
            move = draw.choice(moves(draw, device))
            target = draw.randint(0, 1)
            made[target] = move(made[target], made[1 - target])
        return made

    expected = [int(tensor.isnan().sum()) * tensor.itemsize for tensor in run("cpu")]
    for place, missing in enumerate(expected):
        with check_memory() as faults:
            run("npu")[place].add(1).cpu()
        assert [(fault.operator, fault.bytes) for fault in faults] == [("aten.add.Tensor", missing)] * (missing > 0)


def _bag(**how: Any) -> Move:
    return lambda table, rows: embedding_bag(rows.view(1, -1), table, **how)


ROW_READS: dict[str, Move] = {
    "embedding_bag, sum": _bag(mode="sum"),
    "embedding_bag, mean": _bag(),
    "embedding_bag, largest": _bag(mode="max"),
    "embedding_bag, weighted": lambda table, rows: embedding_bag(
        rows.view(1, -1), table, mode="sum", per_sample_weights=torch.ones(1, len(rows), device="npu")
    ),
    "embedding, limited": lambda table, rows: embedding(rows, table, max_norm=1.0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ROW_READS)
def test_rows_that_are_read_must_be_written(name: str, seed: int) -> None:
    """A fault where an unwritten row is named, in the first operator that reads it; none where all others are unwritten."""
    draw = random.Random(f"{name}{seed}")
    for _ in range(6):
        written, read = (draw.sample(range(8), draw.randint(1, 6)) for _ in range(2))
        rows = torch.tensor(read, device="npu")
        with check_memory() as faults:
            table = torch.empty(8, 8, device="npu")
            table[torch.tensor(written, device="npu")] = 1
            ROW_READS[name](table, rows).sum().cpu()
        assert bool(faults) == bool({*read} - {*written}), (written, read)


def test_the_row_of_a_padding_is_not_read() -> None:
    """A bag leaves it out."""
    with check_memory() as faults:
        table = torch.empty(3, 2, device="npu")
        table[:2] = 1
        rows = torch.tensor([[0, 2, 1]], device="npu")
        assert embedding_bag(rows, table, mode="sum", padding_idx=2).tolist() == [[2, 2]]
        assert faults == []
        embedding_bag(rows, table, mode="sum", padding_idx=0).cpu()
    assert len(faults) == 1


def test_other_arguments_of_such_operators_are_read_whole() -> None:
    """The index of a bag, the gradient of an embedding, the queries of a rotary embedding."""
    index, rows = torch.tensor([0, 1], device="npu"), torch.ones(4, 2, device="npu")
    parameter = torch.nn.Parameter(torch.ones(4, 2, device="npu"))
    with check_memory() as faults:
        half = torch.empty(2, 2, device="npu")
        half[0] = 1
        with torch.enable_grad():
            embedding(index, parameter).backward(half)
        assert [fault.bytes for fault in faults] == [8]
        unwritten = torch.empty(2, dtype=torch.int64, device="npu")
        with pytest.raises(Exception, match="valid range"):
            embedding_bag(unwritten.view(1, 2), rows).cpu()
    assert {fault.operator for fault in faults[1:]} == {"aten._embedding_bag_forward_only.default"}


def test_the_table_of_a_rotary_embedding_is_read_by_positions() -> None:
    """Rows of cosines and sines that no position names may be unwritten; queries may not."""
    positions = torch.tensor([0, 2], device="npu")
    with check_memory() as faults:
        table = torch.empty(4, 8, dtype=torch.float16, device="npu")
        table[::2] = 1
        query, key = (torch.ones(2, 8, dtype=torch.float16, device="npu") for _ in range(2))
        torch.ops.atb._npu_rotary_embedding(positions, query, key, 8, table, True)
        query.cpu()
        assert faults == []
        torch.ops.atb._npu_rotary_embedding(positions + 1, query, key, 8, table, True)
        query.cpu()
        assert len(faults) == 1
        unwritten = torch.empty(2, 8, dtype=torch.float16, device="npu")
        torch.ops.atb._npu_rotary_embedding(positions, unwritten, key, 8, table, True)
        unwritten.cpu()
    assert len(faults) == 2
