"""Operators that compute and communicate in one: what each rank gets, from plain arithmetic on what all ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, RefusedArgumentError, UnsupportedArgumentError, formula_of, together

RANKS = 4


def of_all(name: str, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """The results of every rank."""
    formula = OPERATORS[f"npu::{name}"].across_ranks
    assert formula is not None
    return together(formula, calls)


def whole(*size: int, most: int = 4) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in float16."""
    return torch.randint(-most, most + 1, size).half()


def test_a_sum_of_products() -> None:
    """Each rank adds its own bias and x3; int8 factors are scaled before the sum."""
    torch.manual_seed(0)
    x, w, bias, x3 = ([whole(*size) for _ in range(RANKS)] for size in ((3, 16), (16, 8), (8,), (3, 8)))
    found = of_all(
        "npu_mm_all_reduce_base", *[((x[r], w[r], "g"), {"bias": bias[r], "x3": x3[r]}) for r in range(RANKS)]
    )
    wanted = sum(x[r].double() @ w[r].double() + bias[r] + x3[r] for r in range(RANKS))
    assert all(torch.equal(out.double(), wanted) for out in found)

    a, b = ([torch.randint(-8, 8, size, dtype=torch.int8) for _ in range(RANKS)] for size in ((3, 16), (16, 8)))
    scale, token = torch.full((8,), 0.5).bfloat16(), torch.tensor([1.0, 2.0, 4.0])
    given = {"dequant_scale": scale, "pertoken_scale": token}
    found = of_all("npu_mm_all_reduce_base", *[((a[r], b[r], "g"), given) for r in range(RANKS)])
    wanted = sum(
        (a[r].double() @ b[r].double() * 0.5 * token.double().unsqueeze(1)).bfloat16().double() for r in range(RANKS)
    )
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0].double(), wanted, rtol=0.02, atol=2)


def test_a_sum_that_travels_as_int8() -> None:
    """Every part is rounded by the first scale, and their sum by the second one."""
    ones = torch.ones(1, 1, dtype=torch.int8)
    scales = {"dequant_scale": torch.ones(1).bfloat16(), "comm_quant_scale_1": torch.full((1,), 2.0).bfloat16(),
              "comm_quant_scale_2": torch.full((1,), 8.0).bfloat16()}  # fmt: skip
    # 7 / 2 rounds to 4 (half to even), 5 / 2 to 2; their sum, 6, is 12 in units of one, and 12 / 8 rounds to 2: 16.
    found = of_all("npu_mm_all_reduce_base", *[((ones * n, ones, "g"), scales) for n in (7, 5)])
    assert [out.item() for out in found] == [16.0, 16.0]


def test_parts_of_a_sum_and_gathered_rows() -> None:
    """Reduce-scatter gives each rank its rows; gathering is the other way round, with everybody's scales."""
    torch.manual_seed(1)
    x, w = [whole(8, 256, most=1) for _ in range(RANKS)], [whole(256, 5, most=1) for _ in range(RANKS)]
    zeros = {"bias": torch.zeros(5).half()}
    found = of_all("npu_mm_reduce_scatter_base", *[((x[r], w[r], "g", RANKS), zeros) for r in range(RANKS)])
    wanted = sum(a.double() @ b.double() for a, b in zip(x, w, strict=True))
    assert torch.equal(torch.cat(found).double(), wanted)
    found = of_all("npu_all_gather_base_mm", *[((x[r], w[r], "g", RANKS), zeros) for r in range(RANKS)])
    for rank, (out, gathered) in enumerate(found):
        assert torch.equal(gathered, torch.cat(x))
        assert torch.equal(out.double(), torch.cat(x).double() @ w[rank].double())

    a, b = torch.randint(-8, 8, (2, 3, 256), dtype=torch.int8), torch.randint(-8, 8, (256, 5), dtype=torch.int8)
    token, column = torch.tensor([[[1.0], [2.0], [4.0]], [[8.0], [16.0], [32.0]]]), torch.full((1, 5), 2.0**-10)
    given = {"x2_scale": column, "comm_mode": "aiv", "output_dtype": torch.float16}
    found = of_all("npu_all_gather_base_mm", *[((a[r], b, "g", 2), {**given, "x1_scale": token[r]}) for r in range(2)])
    wanted = a.flatten(0, 1).double() @ b.double() * token.flatten(0, 1).double() * 2.0**-10
    assert torch.equal(found[0][0], wanted.half())


def test_columns_and_rows_change_places() -> None:
    """A product and then its columns to their ranks; rows to their ranks, side by side, and then the product."""
    torch.manual_seed(2)
    x, w, bias = [whole(3, 4) for _ in range(RANKS)], [whole(4, 8) for _ in range(RANKS)], whole(8)
    found = of_all("npu_matmul_all_to_all", *[((x[r], w[r], "g", RANKS, bias), {}) for r in range(RANKS)])
    products = [x[r] @ w[r] + bias for r in range(RANKS)]
    for rank, out in enumerate(found):
        assert torch.equal(out, torch.cat([product[:, 2 * rank : 2 * rank + 2] for product in products]))

    x, w = [whole(8, 4) for _ in range(RANKS)], [whole(16, 5) for _ in range(RANKS)]
    found = of_all("npu_all_to_all_matmul", *[((x[r], w[r], "g", RANKS), {}) for r in range(RANKS)])
    for rank, (out, permuted) in enumerate(found):
        assert torch.equal(permuted, torch.cat([part[2 * rank : 2 * rank + 2] for part in x], 1))
        assert torch.equal(out, permuted @ w[rank])


def test_tokens_to_their_experts_and_back() -> None:
    """Grouped products behind an exchange by counts; the same counts, turned round, bring the rows back in their order."""
    torch.manual_seed(3)
    ranks, experts = 2, 2
    counts = torch.randint(1, 4, (ranks, ranks, experts))  # sender, receiver, expert
    x = [whole(int(counts[r].sum()), 4) for r in range(ranks)]
    weight = [whole(experts, 4, 3) for _ in range(ranks)]
    send = [counts[r].flatten().tolist() for r in range(ranks)]
    take = [counts[:, r].flatten().tolist() for r in range(ranks)]
    shared, matrix = whole(5, 6), whole(6, 2)
    found = of_all(
        "npu_alltoallv_gmm",
        *[
            (
                (x[r], weight[r], "g", ranks, send[r], take[r]),
                {"permute_out_flag": True, "mm_x": shared, "mm_weight": matrix},
            )
            for r in range(ranks)
        ],
    )
    for rank, (out, beside, permuted) in enumerate(found):
        blocks = [part.split(sizes) for part, sizes in zip(x, send, strict=True)]
        rows = [blocks[sender][rank * experts + e] for e in range(experts) for sender in range(ranks)]
        assert torch.equal(permuted, torch.cat(rows))
        assert torch.equal(
            out, torch.cat([torch.cat(rows[e * ranks : (e + 1) * ranks]) @ weight[rank][e] for e in range(experts)])
        )
        assert torch.equal(beside, shared @ matrix)

    unit = torch.eye(4).half().expand(experts, 4, 4)
    back = of_all(
        "npu_gmm_alltoallv",
        *[
            ((found[r][2], unit * (r + 1), "g", ranks, take[r], send[r]), {"trans_gmm_weight": True})
            for r in range(ranks)
        ],
    )
    for rank, (out, beside) in enumerate(back):
        factors = torch.cat([torch.full((int(counts[rank, owner].sum()), 1), owner + 1.0) for owner in range(ranks)])
        assert torch.equal(out, x[rank] * factors.half())
        assert beside is None


def experts_of(tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Different experts for each token."""
    return torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).int()


@pytest.mark.parametrize("form", ["", "_v2"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_mixture_of_experts_over_ranks(form: str, masked: bool) -> None:
    """Dispatch, an expert that multiplies by its number, and combine: each token gets the weighted sum, and its own alone."""
    torch.manual_seed(4)
    tokens, choices, experts, h, local = 5, 3, 8, 32, 2
    x, ids = [whole(tokens, h) for _ in range(RANKS)], [experts_of(tokens, choices, experts) for _ in range(RANKS)]
    scales = [torch.rand(tokens, choices) for _ in range(RANKS)]
    mask = torch.arange(tokens) < 3 if masked else None
    given = {"x_active_mask": mask}
    sent = of_all(
        f"npu_moe_distribute_dispatch{form}", *[((x[r], ids[r], "g", RANKS, r, experts), given) for r in range(RANKS)]
    )
    active = 3 if masked else tokens
    back = []
    for rank, (rows, _, place, numbers, counts, _, _) in enumerate(sent):
        chosen = [
            (e, sender, t)
            for e in range(rank * local, rank * local + local)
            for sender in range(RANKS)
            for t in range(active)
            if e in ids[sender][t].tolist()
        ]
        assert rows.shape[0] == tokens * RANKS * local
        assert torch.equal(rows[: len(chosen)], torch.stack([x[sender][t] for _, sender, t in chosen]))
        assert numbers.tolist() == [sum(1 for e, _, _ in chosen if e == rank * local + i) for i in range(local)]
        assert counts[-1] == len(chosen)
        worked = rows.clone()
        for row, (e, _, _) in enumerate(chosen):
            worked[row] *= e + 1
        back.append((worked, place, counts))
    found = of_all(
        f"npu_moe_distribute_combine{form}",
        *[
            ((back[r][0], ids[r], back[r][1], back[r][2], scales[r], "g", RANKS, r, experts), given)
            for r in range(RANKS)
        ],
    )
    for rank, out in enumerate(found):
        wanted = x[rank].double() * (scales[rank].double() * (ids[rank] + 1)).sum(1, keepdim=True)
        wanted[active:] = 0
        torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-3)


def test_quantised_tokens_and_their_scales() -> None:
    """Each row is smoothed by its expert, and quantised on its own; packed int4 goes as it is, with its token's scale."""
    x, ids = [whole(2, 32) for _ in range(2)], torch.tensor([[0, 2], [3, 1]]).int()
    smooth, weights = torch.tensor([1.0, 2.0, 4.0, 8.0]).unsqueeze(1).expand(4, 32).contiguous(), torch.rand(2, 2)
    given = {"scales": smooth, "quant_mode": 2, "expert_scales": weights, "expert_token_nums_type": 0, "global_bs": 6}
    found = of_all("npu_moe_distribute_dispatch_v2", *[((x[r], ids, "g", 2, r, 4), given) for r in range(2)])
    rows, scale, _, numbers, counts, _, expand = found[1]  # experts 2 and 3
    wanted = torch.stack([x[0][0] * 4, x[1][0] * 4, x[0][1] * 8, x[1][1] * 8]).float()
    assert rows.dtype == torch.int8
    assert rows.shape[0] == 12
    torch.testing.assert_close(rows[:4] * scale[:4].unsqueeze(1), wanted, rtol=0, atol=float(scale.max()))
    assert (numbers.tolist(), counts.tolist()) == ([2, 4], [1, 2, 3, 4])
    assert torch.equal(expand[:4], torch.stack([weights[0, 1], weights[0, 1], weights[1, 0], weights[1, 0]]))

    packed = [torch.randint(0, 99, (2, 32)).int() for _ in range(2)]
    token = [torch.rand(2) for _ in range(2)]
    found = of_all(
        "npu_moe_distribute_dispatch_v2", *[((packed[r], ids, "g", 2, r, 4), {"scales": token[r]}) for r in range(2)]
    )
    assert torch.equal(found[0][0][:4], torch.stack([packed[0][0], packed[1][0], packed[0][1], packed[1][1]]))
    assert torch.equal(found[0][1][:4], torch.stack([token[0][0], token[1][0], token[0][1], token[1][1]]))


def test_experts_on_no_rank_and_a_norm() -> None:
    """A zero, a copy and a constant expert add what their formulas say; the last form adds a residual and normalises."""
    torch.manual_seed(5)
    tokens, h = 4, 32
    ids = torch.tensor([[0, 2], [3, 1], [4, 0], [2, 4]]).int()  # 2: zero, 3: copy, 4: constant
    x, scales, one, two, v = (
        torch.randn(2, tokens, h),
        torch.rand(tokens, 2),
        torch.randn(1, h),
        torch.randn(1, h),
        torch.randn(1, h),
    )
    kinds = {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}
    sent = of_all("npu_moe_distribute_dispatch_v2", *[((x[r], ids, "g", 2, r, 2), kinds) for r in range(2)])
    given = {**kinds, "const_expert_alpha_1": one, "const_expert_alpha_2": two, "const_expert_v": v}
    calls = [(sent[r][0], ids, sent[r][2], sent[r][4], scales) for r in range(2)]
    found = of_all(
        "npu_moe_distribute_combine_v2", *[((*calls[r], "g", 2, r, 2), {**given, "ori_x": x[r]}) for r in range(2)]
    )
    residual, gamma = torch.randn(tokens, 1, h), torch.randn(h)
    normed = of_all(
        "npu_moe_distribute_combine_add_rms_norm",
        *[((*calls[r], residual, gamma, "g", 2, r, 2), {**given, "ori_x": x[r], "norm_eps": 1e-5}) for r in range(2)],
    )
    for rank in range(2):
        one_of = {0: x[rank], 1: x[rank], 2: torch.zeros(tokens, h), 3: x[rank], 4: one * x[rank] + two * v}
        wanted = torch.stack([sum(scales[t, j] * one_of[int(ids[t, j])][t] for j in range(2)) for t in range(tokens)])
        torch.testing.assert_close(found[rank], wanted)
        y, rstd, added = normed[rank]
        torch.testing.assert_close(added, wanted.unsqueeze(1) + residual)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(added, (h,), gamma, 1e-5))
        torch.testing.assert_close(rstd, (added.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


X, IDS = torch.zeros(2, 32).half(), torch.tensor([[0, 1], [1, 0]]).int()
REFUSED = {
    "npu_mm_all_reduce_base": [
        ((X, X.t(), "g"), {"reduce_op": "max"}, "reduce_op"),
        ((X, X, "g"), {}, "x2's first dimension"),
        ((X, X.t().char(), "g"), {}, "antiquant_scale"),
        ((X, X.t(), "g"), {"x3": X}, "x3"),
    ],
    "npu_mm_reduce_scatter_base": [
        ((torch.zeros(2, 256).half(), torch.zeros(256, 4).half(), "g", 3), {}, "world_size"),
        ((torch.zeros(3, 256).half(), torch.zeros(256, 4).half(), "g", 2), {}, "the number of rows"),
        ((X, X.t(), "g", 2), {}, "the inner dimension"),
        ((torch.zeros(2, 256).half(), torch.zeros(256, 4).half(), "g", 2), {"bias": torch.ones(4).half()}, "bias"),
        ((torch.zeros(2, 256).char(), torch.zeros(256, 4).char(), "g", 2), {"x2_scale": torch.ones(1, 4)}, "comm_mode"),
    ],
    "npu_all_gather_base_mm": [
        ((torch.zeros(2, 256).half(), torch.zeros(256, 4).bfloat16(), "g", 2), {}, "the dtypes"),
        ((torch.zeros(2, 256).half(), torch.zeros(256, 4).half(), "g", 2), {"bias": torch.ones(4).half()}, "bias"),
    ],
    "npu_alltoallv_gmm": [((X, X.t().unsqueeze(0), "g", 2, [1, 2], [1, 2]), {}, "the sum of send_counts")],
    "npu_moe_distribute_dispatch_v2": [
        ((X, IDS, "g", 2, 0, 3), {}, "moe_expert_num"),
        ((X, IDS, "g", 2, 2, 4), {}, "ep_rank_id"),
        ((X, IDS, "g", 2, 0, 4), {"scales": torch.ones(4, 32)}, "scales"),
        ((X, IDS.long(), "g", 2, 0, 4), {}, "expert_ids"),
        ((X, IDS + 3, "g", 2, 0, 4), {}, "expert_ids"),
        ((X, IDS, "g", 2, 0, 4), {"x_active_mask": torch.tensor([False, True])}, "x_active_mask"),
        ((X, IDS, "g", 2, 0, 4), {"global_bs": 2}, "the number of tokens"),
    ],
    "npu_moe_distribute_combine_v2": [
        ((X, IDS, IDS.flatten(), IDS.flatten(), torch.ones(2, 2), "g", 2, 0, 4), {}, "the rows of expand_x")
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_device_refuses(name: str) -> None:
    """The error names the argument, and has the device's code."""
    for args, kwargs, culprit in REFUSED[name]:
        with pytest.raises(RefusedArgumentError, match=culprit) as caught:
            of_all(name, *[(args, kwargs)] * 2)
        assert caught.value.code == 161002


def test_one_process_does_not_judge_them() -> None:
    """Where a graph runs without its group, such an operator is an error, not a number."""
    formula = formula_of(torch.ops.npu.npu_mm_all_reduce_base.default)
    assert formula is not None
    with pytest.raises(UnsupportedArgumentError, match="depends on the other ranks"):
        formula(X, X.t(), "g")
