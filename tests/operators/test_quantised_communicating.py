"""Quantised operators that compute and communicate: what four ranks get from numbers worked out here, and refused calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, RefusedArgumentError, UnsupportedArgumentError, together
from npugraph_ex.operators.npu_quant_matmul import npu_quant_matmul

RANKS = 4
EIGHT = torch.float8_e4m3fn


def of_all(name: str, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """The results of every rank."""
    formula = OPERATORS[f"npu::{name}"].across_ranks
    assert formula is not None
    return together(formula, calls)


def whole(*size: int) -> torch.Tensor:
    """Small whole numbers, whose products are exact."""
    return torch.randint(-4, 5, size).char()


def eights(*size: int) -> torch.Tensor:
    """The same as 8-bit floats."""
    return torch.randint(-4, 5, size).to(EIGHT)


def powers(*size: int) -> torch.Tensor:
    """Powers of two as bytes of float8_e8m0fnu."""
    return torch.randint(125, 130, size).to(torch.uint8)


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Elements times the power of two of their 32 neighbours."""
    return x.double() * (2.0 ** (scale.double() - 127)).flatten(-2).repeat_interleave(32, -1)[..., : x.shape[-1]]


def test_one_scale_of_a_tensor_is_the_rank_s_own() -> None:
    """Gathered rows take the scale of the rank that multiplies, as the document has it; those of rows go with them."""
    torch.manual_seed(0)
    x, w = [eights(2, 256) for _ in range(RANKS)], eights(256, 3)
    codes = {"y_dtype": torch.float32, "x2_scale": torch.full((1,), 0.5)}
    found = of_all(
        "npu_all_gather_quant_mm",
        *[((x[r], w, "g", RANKS), {"x1_scale": torch.tensor([2.0**r]), **codes}) for r in range(RANKS)],
    )
    for rank, (out, gathered, amax) in enumerate(found):
        assert torch.equal(out.double(), torch.cat(x).double() @ w.double() * 2.0**rank * 0.5)
        assert torch.equal(gathered.float(), torch.cat(x).float())
        assert (amax.shape, amax.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_factors_and_a_bias(dtype: torch.dtype) -> None:
    """Without scales the pair is the unquantised one, with a bias that counts: once on each rank."""
    torch.manual_seed(1)
    x, w, bias = ([torch.randint(-1, 2, size).to(dtype) for _ in range(RANKS)] for size in ((4, 256), (256, 3), (3,)))
    calls = [((x[r], w[r], "g", RANKS), {"bias": bias[r]}) for r in range(RANKS)]
    for rank, (out, *_) in enumerate(of_all("npu_all_gather_quant_mm", *calls)):
        assert torch.equal(out, (torch.cat(x).double() @ w[rank].double() + bias[rank]).to(dtype))
    parts = torch.stack([(x[r].double() @ w[r].double() + bias[r]) for r in range(RANKS)]).sum(0)
    found = torch.cat([out for out, _ in of_all("npu_quant_mm_reduce_scatter", *calls)])
    torch.testing.assert_close(found, parts.to(dtype), rtol=0.01, atol=0.5)


def test_packed_scales_of_columns() -> None:
    """An int64 scale holds the bits of a float32, and goes with float16."""
    torch.manual_seed(2)
    x, w, scale = whole(RANKS, 256), whole(256, 3), torch.tensor([[0.5, 2.0, 0.25]])
    coded = {"x2_scale": scale.view(torch.int32).long(), "y_dtype": torch.float16}
    found = torch.cat([out for out, _ in of_all("npu_quant_mm_reduce_scatter", *[((x, w, "g", RANKS), coded)] * RANKS)])
    assert torch.equal(found.double(), x.double() @ w.double() * scale * RANKS)
    with pytest.raises(RefusedArgumentError, match="x2_scale"):
        of_all("npu_quant_mm_reduce_scatter", *[((x, w, "g", RANKS), {**coded, "y_dtype": 15})] * RANKS)


def test_a_row_of_zeros_that_is_quantised_on_the_way() -> None:
    """Its scale is 1, so that the bias, which the scales of 8-bit floats multiply, is there; another row's is its largest / 448."""
    x = torch.zeros(2, 4).half()
    x[1, 2] = 8.0
    given = {"bias": torch.tensor([3.0]), "x2_scale": torch.tensor([2.0]), "x1_quant_dtype": EIGHT}
    found = of_all("npu_all_to_all_quant_matmul", *[((x, torch.ones(8, 1).to(EIGHT), "g", 2), given)] * 2)
    assert found[0][0].item() == 6.0
    assert found[1][0].item() == pytest.approx((2 * 448 + 3) * (8 / 448) * 2)
    assert found[0][0].dtype == torch.float32


def test_scales_move_with_their_tokens() -> None:
    """Powers of two belong to rows, wherever these go; counts differ from rank to rank, and one is none."""
    torch.manual_seed(3)
    ranks, counts = 2, torch.tensor([[[1, 2], [0, 3]], [[2, 1], [1, 0]]])  # sender, receiver, expert
    x, w = [eights(int(counts[r].sum()), 64) for r in range(ranks)], [eights(2, 64, 3) for _ in range(ranks)]
    s, t = [powers(len(rows), 1, 2) for rows in x], [powers(2, 1, 3, 2) for _ in range(ranks)]
    send = [counts[r].flatten().tolist() for r in range(ranks)]
    take = [counts[:, r].flatten().tolist() for r in range(ranks)]
    modes = {"gmm_x_quant_mode": 6, "gmm_weight_quant_mode": 6}
    found = of_all(
        "npu_alltoallv_quant_gmm",
        *[((x[r], w[r], s[r], t[r], "g", ranks, send[r], take[r], torch.float16), modes) for r in range(ranks)],
    )
    for rank, (out, shared, permuted) in enumerate(found):
        rows = [scaled(part, scale).split(sizes) for part, scale, sizes in zip(x, s, send, strict=True)]
        weight = scaled(w[rank].mT, t[rank].transpose(1, 2)).mT
        wanted = [torch.cat([sent[rank * 2 + e] for sent in rows]) @ weight[e] for e in range(2)]
        assert torch.equal(out, torch.cat(wanted).half())
        assert (shared, permuted) == (None, None)


def test_blocks_of_a_narrow_matrix() -> None:
    """A column of scales belongs to blocks of rows of the right factor, also where it has at most 128 columns."""
    torch.manual_seed(4)
    x, w, s, t = eights(2, 256), eights(256, 3), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5], [4.0]])
    found = npu_quant_matmul(x, w, t, pertoken_scale=s, output_dtype=6)
    wanted = x[:, :128].double() @ w[:128].double() * 0.5 + x[:, 128:].double() @ w[128:].double() * 8.0
    assert torch.equal(found.double(), wanted)


X, W, ONE = torch.zeros(2, 256).char(), torch.zeros(256, 4).char(), torch.ones(1)
F, G = torch.zeros(2, 256).to(EIGHT), torch.zeros(256, 4).to(EIGHT)
T = {"x1_scale": torch.ones(2, 1), "y_dtype": 5}
S = {"x1_scale": ONE, "x2_scale": ONE, "y_dtype": 5}
P, Q = torch.ones(2), torch.ones(4)
H = torch.zeros(2, 8).byte()
M = {"gmm_x_quant_mode": 1, "gmm_weight_quant_mode": 1, "gmm_x_dtype": 290, "gmm_weight_dtype": 290}
E = torch.zeros(1, 8, 4).byte()
REFUSED = {
    "npu_all_gather_quant_mm": [
        ((X, W, "g", 2), T, "comm_mode"),
        ((X, W, "g", 3), {**T, "comm_mode": "aiv"}, "world_size"),
        ((X, W, "g", 2), {"y_dtype": 5, "comm_mode": "aiv"}, "x1_scale and x2_scale"),
        ((X, W, "g", 2), {"x1_scale": torch.ones(2, 1), "comm_mode": "aiv"}, "y_dtype"),
        ((X, W.half(), "g", 2), {**T, "comm_mode": "aiv"}, "the dtypes of the factors"),
        ((F, G, "g", 2), {**S, "x2_scale": torch.ones(2, 1)}, "x2_scale's shape"),
        ((F, G, "g", 2), {**S, "comm_mode": "aiv"}, "comm_mode"),
        ((F, G, "g", 2), {**S, "gather_index": 1}, "gather_index"),
        ((F, G, "g", 2), {**S, "amax_output": True}, "amax_output"),
        ((F, G, "g", 2), {**S, "group_sizes": [1, 1, 32]}, "group_sizes"),
        ((F.half(), G.half(), "g", 2), {"x1_scale": ONE}, "x1_scale and x2_scale"),
        ((F.half(), G.half(), "g", 2), {"y_dtype": 15}, "y_dtype"),
        ((F[:, :64], G[:64], "g", 2), S, "the inner dimension"),
    ],
    "npu_quant_mm_reduce_scatter": [
        ((X, W, "g", 2), {**T, "reduce_op": "max"}, "reduce_op"),
        ((X[:1], W, "g", 2), {**T, "x1_scale": torch.ones(1, 1)}, "the number of rows"),
        ((X, W, "g", 2), {**T, "comm_mode": "ccu"}, "comm_mode"),
        ((X, W, "g", 2), {**T, "y_dtype": 6}, "y_dtype"),
    ],
    "npu_quant_matmul_all_to_all": [
        ((X, W, "g", 2, None, P, Q), {"y_dtype": 5}, "bias"),
        ((X, W, "g", 2, Q, P, Q), {}, "y_dtype"),
        ((F, G, "g", 2, None, P, Q), {"x1_quant_mode": 6}, "x1_quant_mode and x2_quant_mode"),
        ((F, G, "g", 2, Q.half(), P, Q), {}, "bias"),
        ((F, G, "g", 2, None, None, Q), {}, "x1_scale"),
        ((F, G[:, :3], "g", 2, None, P, Q[:3]), {}, "the number of columns"),
        ((F, G, "g", 2, None, P, Q), {"all2all_axes": [-2, -1]}, "all2all_axes"),
        ((F, G, "g", 2, None, P, Q), {"comm_mode": "aiv"}, "comm_mode"),
        ((F, G, "g", 2, None, P, Q), {"common_quant_mode": 1}, "common_quant_mode"),
        ((F, G, "g", 2, None, P, Q), {"comm_quant_dtype": 5}, "comm_quant_dtype"),
        ((F, W, "g", 2, None, P, Q), {}, "the dtypes of x1 and x2"),
    ],
    "npu_all_to_all_quant_matmul": [
        ((X[:, :128].half(), W, "g", 2), {"x2_scale": Q, "y_dtype": 5}, "x1_quant_dtype"),
        ((F[:, :128].half(), G, "g", 2), {"x2_scale": Q, "x1_quant_dtype": 1}, "x1_quant_dtype"),
        ((F[:, :128].half(), G, "g", 2), {"x2_scale": Q, "x1_scale": torch.ones(256).half()}, "x1_scale"),
        ((F[:, :128], G, "g", 2), {"x2_scale": Q}, "x1 should be"),
        ((F[:1, :128].half(), G, "g", 2), {"x2_scale": Q}, "the number of rows"),
        ((F[:, :128].half(), G, "g", 2), {}, "x2_scale"),
        ((F[:, :96], G[:192], "g", 2), {"x1_quant_mode": 6, "x2_quant_mode": 6}, "x1's last dimension"),
    ],
    "npu_alltoallv_quant_gmm": [
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {}, "gmm_x_quant_mode and gmm_weight_quant_mode"),
        ((H, E, ONE, ONE, "g", 2, [1, 2], [1, 1], 5), M, "the sum of send_counts"),
        ((H, E, ONE, ONE, "g", 2, [1, 1, 1], [1, 1], 5), M, "send_counts"),
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 6), M, "gmm_y_dtype"),
        ((H, E, P, ONE, "g", 2, [1, 1], [1, 1], 5), M, "gmm_x_scale"),
        ((H, E, ONE.half(), ONE, "g", 2, [1, 1], [1, 1], 5), M, "gmm_x_scale"),
        ((H, E[:, :4], ONE, ONE, "g", 2, [1, 1], [1, 1], 5), M, "gmm_weight's rows"),
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {**M, "mm_x": H}, "mm_x and mm_weight"),
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {**M, "mm_y_dtype": 5}, "mm_y_dtype"),
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {**M, "mm_x": H, "mm_weight": E[0]}, "mm_x_quant_mode"),
    ],
    "npu_quant_gmm_alltoallv": [
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {**M, "comm_quant_mode": 1}, "comm_quant_mode"),
        ((H, E, ONE, ONE, "g", 3, [1, 1], [1, 1], 5), M, "ep_world_size"),
        ((H, E, ONE, ONE, "g", 2, [1, 1], [1, 1], 5), {**M, "group_size": [1, 1, 32]}, "group_size"),
    ],
    "_npu_distribute_barrier": [((P, "g", 1), {}, "world_size"), ((P, "g", 2), {"time_out": P}, "time_out")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_device_refuses(name: str) -> None:
    """The error names the argument, and has the device's code."""
    for args, kwargs, culprit in REFUSED[name]:
        with pytest.raises(RefusedArgumentError, match=culprit) as caught:
            of_all(name, *[(args, kwargs)] * 2)
        assert caught.value.code == 161002


def test_what_the_documents_leave_open_is_not_covered() -> None:
    """Packed int4, of which layouts are not told; a bias of which two documents disagree; ranks that are gone."""
    four = torch.zeros(256, 1).int()
    for name, args, kwargs in (
        ("npu_all_gather_quant_mm", (F, G, "g", 2), {**S, "bias": Q}),
        ("npu_quant_mm_reduce_scatter", (F, G, "g", 2), {**S, "bias": Q}),
        ("npu_all_gather_quant_mm", (X, W, "g", 2), {**T, "x1_dtype": 285, "comm_mode": "aiv"}),
        ("npu_all_to_all_quant_matmul", (X[:, :128].half(), four, "g", 2), {"x2_scale": Q, "y_dtype": 5}),
        ("_npu_distribute_barrier", (P, "g", 2), {"elastic_info": torch.zeros(8).int()}),
    ):
        with pytest.raises(UnsupportedArgumentError):
            of_all(name, *[(args, kwargs)] * 2)
