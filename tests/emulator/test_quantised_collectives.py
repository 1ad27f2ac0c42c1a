"""Quantised operators that compute and communicate, over two emulated devices: the same as collectives and products, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hccl_ranks import RANKS, on_emulated_ranks

pytestmark = on_emulated_ranks

_SPELLED = (
    RANKS
    + """
npu = torch.ops.npu
HIFLOATS = {8: 1.0, 12: 1.5, 16: 2.0, 24: 0.5, 136: -1.0, 144: -2.0}  # a few bytes, worked out from the format's definition
FOURS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
COUNTS = torch.tensor([[[1, 2], [2, 1]], [[0, 3], [2, 2]]])  # sender, receiver, expert

def whole(*size): return torch.randint(-4, 5, size).char()
def eights(*size): return torch.randint(-4, 5, size).to(torch.float8_e4m3fn)
def hifloats(*size): return torch.tensor([*HIFLOATS])[torch.randint(6, size)].byte()
def nibbles(*size): return torch.randint(256, size).byte()
def numbers(*size): return 2.0 ** torch.randint(-3, 3, size)
def powers(*size): return torch.randint(125, 129, size).byte()

def of_hifloats(x): return sum((x == byte) * value for byte, value in HIFLOATS.items())
def of_nibbles(x): return FOURS.npu()[torch.stack((x & 15, x >> 4), -1).flatten(-2).long()]
def spread(scale, k): return (2.0 ** (scale.float() - 127)).flatten(-2).repeat_interleave(32, -1)[..., :k]
def mx(x, scale): return x.float() * spread(scale, x.shape[-1])

def bytes_of(x): return x.contiguous().view(torch.uint8)
def gathered(x):
    parts = [torch.empty_like(bytes_of(x)) for _ in range(2)]
    dist.all_gather(parts, bytes_of(x))
    return torch.cat(parts).view(x.dtype)
def exchanged(x, give=None, take=None):
    out = torch.empty(sum(take) if take else x.shape[0], *bytes_of(x).shape[1:], dtype=torch.uint8, device="npu")
    dist.all_to_all_single(out, bytes_of(x), take, give)
    return out.view(x.dtype)
def scattered(x):
    out = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x)
    return out
def by_columns(y): return exchanged(torch.cat(y.chunk(2, 1)))
def side_by_side(x): return torch.cat(exchanged(x).chunk(2), 1)
def by_expert(x, rank):
    blocks = x.split(COUNTS[:, rank].flatten().tolist())  # by sender, then by expert
    return torch.cat([blocks[place] for place in (0, 2, 1, 3)])
def by_rank(x, rank):
    blocks = x.split([int(COUNTS[rank, to, expert]) for expert in range(2) for to in range(2)])
    return torch.cat([blocks[place] for place in (0, 2, 1, 3)])
def experts(x, w, rank, taken=True):
    sizes = (COUNTS[:, rank].sum(0) if taken else COUNTS[rank].sum(0)).tolist()
    return torch.cat([rows @ w[e] for e, rows in enumerate(x.split(sizes))])

def cases(rank, group):
    # For each: what makes inputs, the fused operator, and the same of single steps.
    sent, taken = COUNTS[rank].flatten().tolist(), COUNTS[:, rank].flatten().tolist()
    give, take = COUNTS[rank].sum(1).tolist(), COUNTS[:, rank].sum(1).tolist()
    hi = {f"{which}_{of}": value for which in ("gmm_x", "gmm_weight", "mm_x", "mm_weight")
          for of, value in (("quant_mode", 1), ("dtype", 290))}
    of_mx = {"gmm_x_quant_mode": 6, "gmm_weight_quant_mode": 6, "gmm_x_scale_dtype": 293, "gmm_weight_scale_dtype": 293}
    six = {"x1_quant_mode": 6, "x2_quant_mode": 6, "x1_scale_dtype": 293, "x2_scale_dtype": 293}
    return {
        "gather int8": (
            lambda: (whole(3, 256), whole(256, 8), numbers(3, 1), numbers(1, 8)),
            lambda x, w, s, t: npu.npu_all_gather_quant_mm(x, w, group, 2, x1_scale=s, x2_scale=t, y_dtype=15, comm_mode="aiv")[:2],
            lambda x, w, s, t: ((gathered(x).float() @ w.float() * gathered(s) * t).bfloat16(), gathered(x)),
        ),
        "gather mx": (
            lambda: (eights(3, 256), eights(8, 256), powers(3, 4, 2), powers(4, 8, 2)),
            lambda x, w, s, t: npu.npu_all_gather_quant_mm(x, w.t(), group, 2, x1_scale=s, x2_scale=t, y_dtype=6)[:2],
            lambda x, w, s, t: (mx(gathered(x), gathered(s)) @ mx(w, t.transpose(0, 1)).t(), gathered(x)),
        ),
        "gather blocks": (
            lambda: (eights(2, 320), eights(320, 8), numbers(1, 3), numbers(3, 1)),
            lambda x, w, s, t: npu.npu_all_gather_quant_mm(x, w, group, 2, x1_scale=s, x2_scale=t, y_dtype=6)[:1],
            lambda x, w, s, t: ((gathered(x).float() * gathered(s).repeat_interleave(2, 0).repeat_interleave(128, 1)[:, :320])
                                @ (w.float() * t.repeat_interleave(128, 0)[:320]),),
        ),
        "scatter hifloat8": (
            lambda: (hifloats(4, 256), hifloats(256, 8), numbers(1), numbers(1)),
            lambda x, w, s, t: npu.npu_quant_mm_reduce_scatter(
                x, w, group, 2, x1_scale=s, x2_scale=t, x1_dtype=290, x2_dtype=290, y_dtype=15)[:1],
            lambda x, w, s, t: (scattered((of_hifloats(x) @ of_hifloats(w) * s * t).bfloat16()),),
        ),
        "scatter int8": (
            lambda: (whole(4, 256), whole(256, 8), numbers(1, 8)),
            lambda x, w, t: npu.npu_quant_mm_reduce_scatter(x, w, group, 2, x2_scale=t, y_dtype=5)[:1],
            lambda x, w, t: (scattered((x.float() @ w.float() * t).half()),),
        ),
        "columns int8": (
            lambda: (whole(3, 16), whole(16, 8), numbers(3), numbers(8), numbers(8)),
            lambda x, w, s, t, b: npu.npu_quant_matmul_all_to_all(x, w, group, 2, b, s, t, y_dtype=5),
            lambda x, w, s, t, b: by_columns((x.float() @ w.float() * s.unsqueeze(1) * t + b).half()),
        ),
        "columns float8": (
            lambda: (eights(3, 16), eights(16, 8), numbers(3), numbers(8), numbers(8)),
            lambda x, w, s, t, b: npu.npu_quant_matmul_all_to_all(x, w, group, 2, b, s, t),
            lambda x, w, s, t, b: by_columns((x.float() @ w.float() + b) * s.unsqueeze(1) * t),
        ),
        "columns mx": (
            lambda: (eights(3, 64), eights(8, 64), powers(3, 1, 2), powers(8, 1, 2), numbers(8)),
            lambda x, w, s, t, b: npu.npu_quant_matmul_all_to_all(x, w.t(), group, 2, b, s, t, **six),
            lambda x, w, s, t, b: by_columns(mx(x, s) @ mx(w, t).t() + b),
        ),
        "rows int8": (
            lambda: (torch.randn(4, 8).half(), whole(16, 6), numbers(16).half(), numbers(6), numbers(6)),
            lambda x, w, s, t, b: npu.npu_all_to_all_quant_matmul(
                x, w, group, 2, x1_scale=s, x2_scale=t, bias=b, x1_quant_dtype=1, y_dtype=5),
            lambda x, w, s, t, b: [((q.float() @ w.float() * scale.unsqueeze(1) * t + b).half(), p) for p in [side_by_side(x)]
                                   for q, scale in [npu.npu_dynamic_quant(p, smooth_scales=s)]][0],
        ),
        "rows float8": (
            lambda: (torch.randn(4, 8).bfloat16(), eights(16, 6), numbers(6), numbers(6)),
            lambda x, w, t, b: npu.npu_all_to_all_quant_matmul(x, w, group, 2, x2_scale=t, bias=b, x1_quant_dtype=24),
            lambda x, w, t, b: [((q.float() @ w.float() + b) * scale.unsqueeze(1) * t, p) for p in [side_by_side(x)]
                                for q, scale in [npu.npu_dynamic_quant(p, dst_type=24)]][0],
        ),
        "rows mx": (
            lambda: (nibbles(4, 32), nibbles(6, 64), powers(4, 1, 2), powers(6, 2, 2)),
            lambda x, w, s, t: npu.npu_all_to_all_quant_matmul(
                x, w.t(), group, 2, x1_scale=s, x2_scale=t, x1_dtype=296, x2_dtype=296, **six),
            lambda x, w, s, t: (mx(of_nibbles(side_by_side(x)), side_by_side(s)) @ mx(of_nibbles(w), t).t(), side_by_side(x)),
        ),
        "to experts": (
            lambda: (eights(sum(sent), 64), eights(2, 4, 64), powers(sum(sent), 1, 2), powers(2, 1, 4, 2)),
            lambda x, w, s, t: npu.npu_alltoallv_quant_gmm(
                x, w.mT, s, t, group, 2, sent, taken, 15, permute_out_flag=True, **of_mx)[::2],
            lambda x, w, s, t: [(experts(mx(p, q), mx(w, t.transpose(1, 2)).mT, rank).bfloat16(), p)
                                for p, q in [[by_expert(exchanged(sent, give, take), rank) for sent in (x, s)]]][0],
        ),
        "from experts": (
            lambda: (hifloats(sum(sent), 8), hifloats(2, 8, 4), numbers(1), numbers(1), hifloats(3, 8), hifloats(5, 8), numbers(1)),
            lambda x, w, s, t, y, v, u: npu.npu_quant_gmm_alltoallv(
                x, w, s, t, group, 2, sent, taken, 5, mm_x=y, mm_weight=v.t(), mm_x_scale=u, mm_weight_scale=s, mm_y_dtype=5, **hi),
            lambda x, w, s, t, y, v, u: (
                exchanged(by_rank((experts(of_hifloats(x), of_hifloats(w), rank, False) * s * t).half(), rank), give, take),
                (of_hifloats(y) @ of_hifloats(v).t() * u * s).half()),
        ),
    }

def differ(found, wanted):
    found, wanted = ([leaf] if isinstance(leaf, torch.Tensor) else leaf for leaf in (found, wanted))
    return len(found) != len(wanted) or any(
        one.dtype != other.dtype or not torch.equal(bytes_of(one.cpu()), bytes_of(other.cpu()))
        for one, other in zip(found, wanted))

def ordered(x, w, s, t, group):
    # One after the other, although nothing but the group connects them.
    out, _, _ = npu.npu_all_gather_quant_mm(x, w, group, 2, x1_scale=s, x2_scale=t, y_dtype=15, comm_mode="aiv")
    back, _ = npu.npu_quant_mm_reduce_scatter(x[:2] + x[:2], w, group, 2, x1_scale=s[:2], x2_scale=t, y_dtype=15)
    after = npu._npu_distribute_barrier(t, group, 2)
    return out * 2, back + 1, after * 3

def ran(log): return [one.name for one in log if one.name.startswith(("npu.", "npu._npu", "hccl"))]

def waits(rank, group):
    # Whether rank 0 is through the barrier before rank 1 comes to it, and behind it; the store orders the two processes.
    store, done, x = dist.distributed_c10d._get_default_store(), torch.npu.Event(), torch.arange(3).npu()
    if rank:
        store.wait(["rank 0 waits"])
    out = npu._npu_distribute_barrier(x, group, 2)
    done.record()
    before = done.query() if rank == 0 else False
    store.set("rank 0 waits", "1") if rank == 0 else None
    done.synchronize()
    return [before, done.query(), torch.equal(out.cpu(), torch.arange(3))]

def work(rank, ranks):
    torch.manual_seed(rank)
    group, wrong = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank), []
    for name, (make, fused, spelled) in cases(rank, group).items():
        given = [value.npu() for value in make()]
        if differ(fused(*given), spelled(*given)):
            wrong.append(f"{name}: eager")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            results = fused(*given)
        for place, value in zip(given, make()):
            place.copy_(value)
        graph.replay()
        if differ(results, spelled(*given)):
            wrong.append(f"{name}: replayed")
    given = [value.npu() for value in (whole(3, 256), whole(256, 8), numbers(3, 1), numbers(1, 8))]
    compiled = torch.compile(ordered, backend="npugraph_ex", dynamic=False, fullgraph=True)
    logs = []
    for _ in range(3):
        with npu_emulator.kernel_log() as log:
            found = compiled(*given, group)
            torch.npu.synchronize()
        logs.append(ran(log))
        given[0].copy_(whole(3, 256))
        found, eager = [value.cpu() for value in compiled(*given, group)], [value.cpu() for value in ordered(*given, group)]
        wrong += ["compiled"] if differ(found, eager) else []
    with npu_emulator.kernel_log() as log:
        ordered(*given, group)
        torch.npu.synchronize()
    wrong += ["order"] if any(one != ran(log) for one in logs[1:]) or len(ran(log)) != 9 else []
    return wrong, waits(rank, group)

answer = over_ranks(2, work)
"""
)


@pytest.mark.slow
def test_quantised_forms_are_collectives_and_products(ask: Callable[..., Any]) -> None:
    """Eager and replayed with other numbers, each is what torch.distributed and plain products give; compiled, order is kept.

    Nobody passes the barrier before all have come to it.
    """
    for wrong, waited in ask(_SPELLED, NPU_EMULATOR_DEVICES="2", NPU_EMULATOR_SCHEDULE="random:7"):
        assert wrong == []
        assert waited == [False, True, True]
