"""The references of inference attention, scatter, expert gating and grouped products: values by hand, metadata by torch_npu."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

ATTENTION = ("npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2")
NAMES = (
    ("num_heads", "scale", "actual_seq_lengths", "actual_seq_lengths_kv", "softmax_lse_flag"),
    ("num_query_heads", "softmax_scale", "actual_seq_qlen", "actual_seq_kvlen", "return_softmax_lse"),
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def assert_same_metadata(name: str, *args: Any, **kwargs: Any) -> None:
    """The reference on CPU tensors and torch_npu's meta function give the same shapes, dtypes and strides."""
    to_meta = torch.utils._pytree.tree_map_only
    operator = getattr(torch.ops.npu, name.removeprefix("npu::")).default
    meta_args, meta_kwargs = to_meta(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    expected, actual = operator(*meta_args, **meta_kwargs), OPERATORS[name].formula(*args, **kwargs)
    flat = [torch.utils._pytree.tree_leaves(outputs) for outputs in (expected, actual)]
    facts = [[(t.shape, t.dtype, t.stride()) for t in outputs] for outputs in flat]
    assert facts[0] == facts[1]


def attention(
    version: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """Call a version by the names of the first."""
    renamed = {dict(zip(NAMES[0], NAMES[version], strict=True)).get(key, key): value for key, value in kwargs.items()}
    return OPERATORS[ATTENTION[version]].formula(q, k, v, **renamed)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_attention_has_the_metadata_of_torch_npu(version: int, dtype: torch.dtype, layout: str) -> None:
    """Every covered layout, with and without the statistics, with shared heads."""
    shapes = {"BSH": ((2, 3, 32), (2, 5, 16)), "BSND": ((2, 3, 4, 8), (2, 5, 2, 8))}
    query, cache = shapes.get(layout, ((2, 4, 3, 8), (2, 2, 5, 8)))
    q, k, v = torch.randn(query).to(dtype), torch.randn(cache).to(dtype), torch.randn(cache).to(dtype)
    heads, _, _, _, lse = NAMES[version]
    for flag in (False, True):
        kwargs = {heads: 4, "num_key_value_heads": 2, "input_layout": layout, lse: flag}
        assert_same_metadata(ATTENTION[version], q, k, v, **kwargs)


@pytest.mark.parametrize("version", [0, 1])
def test_attention_by_hand(version: int) -> None:
    """Scores 0 and ln 3 weigh values 1 and 5 by 1/4 and 3/4: 4, and the log of the sum is ln 4."""
    q = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0], [2 * math.log(3)]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0], [5.0]]]], dtype=torch.float64)
    out, lse = attention(version, q, k, v, input_layout="BNSD", scale=0.5, softmax_lse_flag=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out.item(), 4.0, rtol=1e-14, atol=0)
    torch.testing.assert_close(lse.item(), math.log(4), rtol=1e-14, atol=0)
    out, lse = attention(version, q, k, v, input_layout="BNSD", actual_seq_lengths_kv=[1], softmax_lse_flag=True)
    assert (out.item(), lse.item()) == (1.0, 0.0)


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_attention_is_torchs_where_they_meet(mode: int) -> None:
    """Grouped heads, a mask and causality from the right agree with scaled_dot_product_attention in float64."""
    q = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64).unbind()
    mask = torch.ones(3, 5).triu(3).bool() if mode == 3 else torch.rand(2, 1, 3, 5) < 0.4
    given = None if mode == 3 else mask
    out, _ = attention(
        0,
        q,
        k,
        v,
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BNSD",
        scale=0.3,
        atten_mask=given,
        sparse_mode=mode,
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, ~mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, torch.nan_to_num(expected), rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_and_rows_that_do_not_count_are_zero() -> None:
    """A row masked altogether has output 0 and statistic +inf, and so has a row behind its sequence's length."""
    q = k = v = torch.ones(1, 1, 3, 2)
    mask = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])
    out, lse = attention(
        0, q, k, v, input_layout="BNSD", atten_mask=mask, actual_seq_lengths=[2], softmax_lse_flag=True, sparse_mode=1
    )
    assert out[0, 0, :, 0].tolist() == [0, 1, 0]
    assert lse.flatten().isinf().tolist() == [True, False, True]


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_length_of_a_query_of_one_row_means_nothing(version: int, layout: str) -> None:
    """The device takes any: one for all entries, one for each, and 0; of longer queries a length that is too large is refused."""
    name = "npu::npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    lengths, heads = ("actual_seq_qlen", "num_query_heads") if version == 2 else ("actual_seq_lengths", "num_heads")

    def run(rows: int, given: list[int] | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        operands = []
        for count in (rows, 6, 6):
            operand = torch.randn(2, 4, count, 8, generator=generator)
            operand = operand if layout == "BNSD" else operand.transpose(1, 2)
            operands.append(operand.flatten(2) if layout == "BSH" else operand)
        return OPERATORS[name].formula(*operands, input_layout=layout, **{heads: 4, lengths: given})[0]  # type: ignore[no-any-return]

    expected = run(1, None)
    assert expected.abs().sum() > 0
    for given in ([100], [100, 0], [7, 7, 7]):
        torch.testing.assert_close(run(1, given), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"3 rows.* 100"):
        run(3, [100])
    with pytest.raises(ValueError, match=r"key length.* 2"):
        OPERATORS[name].formula(
            torch.ones(3, 1, 8),
            *[torch.ones(3, 6, 8)] * 2,
            **{heads: 1, lengths.replace("lengths", "lengths_kv").replace("qlen", "kvlen"): [1, 2]},
        )
    torch.testing.assert_close(run(3, [2, 3, 9]), run(3, [2, 3]), rtol=0, atol=0)


def test_layouts_and_pages_hold_the_same_attention() -> None:
    """BSH, BSND, BNSD and both paged caches give the same numbers."""
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    kwargs: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths_kv": [5, 3]}
    expected, _ = attention(0, q, k, v, input_layout="BNSD", **kwargs)
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    assert torch.equal(attention(0, *rows, input_layout="BSND", **kwargs)[0].transpose(1, 2), expected)
    flat = [tensor.flatten(2) for tensor in rows]
    assert torch.equal(
        attention(0, *flat, input_layout="BSH", **kwargs)[0].unflatten(-1, (4, 8)).transpose(1, 2), expected
    )
    table = torch.tensor([[2, 0, 3], [1, 4, -1]], dtype=torch.int32)  # the last block of the second is behind its end
    pages = []
    for cache in (k, v):
        paged = torch.full((5, 2, 2, 8), 99.0)  # [blocks, heads, rows of a block, D]
        for entry, block in itertools.product(range(2), range(3)):
            if table[entry, block] >= 0:
                paged[table[entry, block]] = cache[entry, :, 2 * block : 2 * block + 2]
        pages.append(paged)
    kwargs |= {"block_table": table, "block_size": 2, "input_layout": "BNSD"}
    assert torch.equal(attention(0, q, *pages, **kwargs)[0], expected)
    joined = [page.transpose(1, 2).flatten(2) for page in pages]
    assert torch.equal(attention(0, q, *joined, **kwargs)[0], expected)


PACKED: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "TND", "softmax_lse_flag": True}


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize("paged", [False, True])
def test_packed_sequences_are_the_sequences_one_by_one(version: int, mode: int, paged: bool) -> None:
    """TND gives each sequence what BSND gives it alone; rows behind the last one are 0, their statistics +inf."""
    rows, columns = [3, 1, 2], [4, 5, 2]
    q, k, v = torch.randn(8, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    band = {"sparse_mode": mode, "pre_tokens": 2, "next_tokens": 1} if mode == 4 else {"sparse_mode": mode}
    totals = list(itertools.accumulate(rows))
    if paged:
        table, pages = torch.zeros(3, 3, dtype=torch.int32), [torch.full((9, 2, 16), 99.0) for _ in range(2)]
        for entry, (start, length) in enumerate(zip((0, 4, 9), columns, strict=True)):
            for block in range(0, length, 2):
                table[entry, block // 2] = 8 - 3 * entry - block // 2
                taken = slice(start + block, min(start + block + 2, start + length))
                for page, cache in zip(pages, (k, v), strict=True):
                    page[table[entry, block // 2], : taken.stop - taken.start] = cache[taken].flatten(1)
        cache = {"actual_seq_lengths_kv": columns, "block_table": table, "block_size": 2}
        given = (q, *pages)
    else:
        cache, given = {"actual_seq_lengths_kv": list(itertools.accumulate(columns))}, (q, k, v)
    out, lse = attention(version, *given, actual_seq_lengths=totals, **cache, **band, **PACKED)
    assert out.shape == (8, 4, 8)
    assert lse.shape == (8, 4, 1)
    alone = PACKED | {"input_layout": "BSND"}
    for entry, (n, m) in enumerate(zip(rows, columns, strict=True)):
        first, begin = totals[entry] - n, sum(columns[:entry])
        one = (q[first : first + n], k[begin : begin + m], v[begin : begin + m])
        expected, statistic = attention(version, *(part.unsqueeze(0) for part in one), **band, **alone)
        torch.testing.assert_close(out[first : first + n], expected[0])
        torch.testing.assert_close(lse[first : first + n], statistic[0].transpose(0, 1))
    assert not out[6:].any()
    assert lse[6:].isposinf().all()


@pytest.mark.parametrize("version", [0, 1])
def test_packed_attention_has_the_metadata_of_torch_npu(version: int) -> None:
    """TND, with and without the statistics."""
    q, k = torch.randn(7, 4, 8).half(), torch.randn(9, 2, 8).half()
    heads, _, rows, columns, lse = NAMES[version]
    for flag in (False, True):
        kwargs = {heads: 4, "num_key_value_heads": 2, "input_layout": "TND", rows: [3, 7], columns: [4, 9], lse: flag}
        assert_same_metadata(ATTENTION[version], q, k, k, **kwargs)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "TND"])
def test_rotary_parts_join_the_heads(layout: str) -> None:
    """Scores of query and key plus those of their rotary parts are the scores of the joined heads, in every layout."""
    q, qr, k, kr = (torch.randn(1, 3, n, d) for n, d in ((4, 8), (4, 2), (2, 8), (2, 2)))
    form = {
        "BSH": lambda x: x.flatten(2),
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2).contiguous(),
        "TND": lambda x: x[0],
    }[layout]
    kwargs: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout}
    if layout == "TND":
        kwargs |= {"actual_seq_lengths": [3], "actual_seq_lengths_kv": [3]}
    found, _ = attention(0, form(q), form(k), form(k), query_rope=form(qr), key_rope=form(kr), **kwargs)
    joined = (torch.cat([q, qr], -1), torch.cat([k, kr], -1), k)
    expected, _ = attention(0, *(part.transpose(1, 2) for part in joined), **kwargs | {"input_layout": "BNSD"})
    torch.testing.assert_close(found, form(expected.transpose(1, 2)))
    with pytest.raises(ValueError, match="key_rope beside it"):
        attention(0, form(q), form(k), form(k), query_rope=form(qr), **kwargs)


def test_packed_lengths_are_checked() -> None:
    """Missing totals, totals that fall or that pass the end, and a mask or shift that TND does not take are named."""
    q = torch.ones(4, 1, 2)
    for rows in (None, [3, 2], [2, 5]):
        with pytest.raises(ValueError, match="running totals"):
            attention(0, q, q, q, input_layout="TND", actual_seq_lengths=rows, actual_seq_lengths_kv=[4])
    lengths: dict[str, Any] = {"input_layout": "TND", "actual_seq_lengths": [4], "actual_seq_lengths_kv": [4]}
    for name in ("pse_shift", "atten_mask"):
        with pytest.raises(UnsupportedArgumentError, match=name):
            attention(0, q, q, q, **{name: torch.zeros(4, 4)}, **lengths)


def test_attention_refuses_what_it_does_not_cover() -> None:
    """A layout, a quantised cache and an impossible length are errors that name the argument."""
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(UnsupportedArgumentError, match="input_layout='SND'"):
        attention(0, q, q, q, input_layout="SND")
    with pytest.raises(UnsupportedArgumentError, match=r"query=torch\.float8_e4m3fn"):
        attention(0, *(3 * [q.to(torch.float8_e4m3fn)]), input_layout="BNSD")
    with pytest.raises(ValueError, match="length 0 is 3"):
        attention(0, q, q, q, input_layout="BNSD", actual_seq_lengths_kv=[3])


def test_scatter_writes_slices_in_place_and_into_a_copy() -> None:
    """Indices of one coordinate name rows, of two name elements; the copy leaves its source alone."""
    update, update_ = OPERATORS["npu::npu_scatter_nd_update"].formula, OPERATORS["npu::npu_scatter_nd_update_"].formula
    x = torch.zeros(3, 2)
    out = update(x, torch.tensor([[2], [0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert out.tolist() == [[3, 4], [0, 0], [1, 2]]
    assert not x.any()
    assert update_(x, torch.tensor([[1, 1]], dtype=torch.int32), torch.tensor([7.0])) is x
    assert x.tolist() == [[0, 0], [0, 7], [0, 0]]
    assert_same_metadata("npu::npu_scatter_nd_update", x.t(), torch.tensor([[1]]), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        update(x, torch.tensor([[2], [0]]), torch.ones(2, 3))


@pytest.mark.parametrize("dtype", TYPES)
def test_gating_has_the_metadata_of_torch_npu(dtype: torch.dtype) -> None:
    """Two and three dimensions, with and without finished rows."""
    for shape in ((3, 4), (2, 3, 4)):
        x = torch.randn(shape).to(dtype)
        assert_same_metadata("npu::npu_moe_gating_top_k_softmax", x, None, 2)
        assert_same_metadata("npu::npu_moe_gating_top_k_softmax", x, torch.zeros(shape[:-1]).bool(), 3)


def test_gating_by_hand() -> None:
    """The largest shares in order, the lower expert first among equals, row numbers down the columns, finished rows marked."""
    x = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]], dtype=torch.float64))
    y, experts, rows = OPERATORS["npu::npu_moe_gating_top_k_softmax"].formula(x, torch.tensor([False, False]), 2)
    torch.testing.assert_close(y, torch.tensor([[0.6, 0.3], [0.4, 0.4]], dtype=torch.float64))
    assert (experts.tolist(), rows.tolist()) == ([[1, 2], [0, 2]], [[0, 2], [1, 3]])
    assert OPERATORS["npu::npu_moe_gating_top_k_softmax"].formula(x, torch.tensor([True, False]), 1)[1].tolist() == [
        [3],
        [0],
    ]


@pytest.mark.parametrize("dtype", TYPES)
def test_grouped_products_have_the_metadata_of_torch_npu(dtype: torch.dtype) -> None:
    """Lists without a split, and rows split over one stacked weight or a list of them."""
    name, x = "npu::npu_grouped_matmul", torch.randn(5, 4).to(dtype)
    weights = [torch.randn(4, 6).to(dtype) for _ in range(2)]
    assert_same_metadata(name, [x, x[:2]], weights, group_type=-1)
    for weight in (weights, [torch.stack(weights)]):
        for kind, groups in ((0, [2, 5]), (1, [2, 3])):
            kwargs = {"group_list": torch.tensor(groups), "group_list_type": kind, "group_type": 0, "split_item": 3}
            assert_same_metadata(name, [x], weight, **kwargs)


def test_grouped_products_by_hand() -> None:
    """Rows meet their group's matrix and bias; rows behind the last group are 0; float64 stays float64."""
    grouped = OPERATORS["npu::npu_grouped_matmul"].formula
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    weight, bias = torch.tensor([[[10.0]], [[100.0]]], dtype=torch.float64), torch.tensor([[1.0], [2.0]])
    for kind, groups in ((0, [1, 3]), (1, [1, 2])):
        (out,) = grouped(
            [x],
            [weight],
            bias=[bias],
            group_list=torch.tensor(groups),
            group_list_type=kind,
            group_type=0,
            split_item=2,
        )
        assert out.flatten().tolist() == [11, 202, 302, 0]
        assert out.dtype == torch.float64
    first, second = grouped([x[:1], x[1:2]], [weight[0], weight[1]], group_type=-1)
    assert (first.item(), second.item()) == (10, 200)
    with pytest.raises(ValueError, match="groups of the 4 rows"):
        grouped([x], [weight], group_list=torch.tensor([1, 9]), group_type=0, split_item=2)


def test_what_is_not_covered_is_refused() -> None:
    """Codes without their scale, caches of no known layout and pages without lengths are no numbers to compute with."""
    codes = torch.ones(1, 2, 4, dtype=torch.int8)
    with pytest.raises(UnsupportedArgumentError, match=r"query=torch\.int8"):
        attention(0, codes, codes, codes)
    query, table = torch.randn(1, 1, 4), torch.zeros(1, 1, dtype=torch.int32)
    nested, pages = torch.randn(2, 1, 1, 1, 2, 4), torch.randn(2, 2, 4)
    with pytest.raises(UnsupportedArgumentError, match="3, 4 or 5 dimensions"):
        attention(0, query, nested, nested, block_table=table, actual_seq_lengths_kv=[1])
    with pytest.raises(ValueError, match="needs the lengths"):
        attention(0, query, pages, pages, block_table=table)
    grouped, split = OPERATORS["npu::npu_grouped_matmul"].formula, {"group_list": torch.tensor([2]), "group_type": 0}
    for x, weight, name in ((codes[0], codes[0].mT, "scale"), (codes[0].float(), codes[0].mT, "antiquant_scale")):
        with pytest.raises(UnsupportedArgumentError, match=rf"\b{name}=None"):
            grouped([x], [weight.unsqueeze(0)], split_item=3, **split)
