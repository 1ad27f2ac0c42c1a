"""What inference attention takes beside plain operands: each form against the same call in the plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, RefusedArgumentError, UnsupportedArgumentError
from npugraph_ex.operators._int4 import pack
from tests.operators.test_inference_operators import ATTENTION, assert_same_metadata

FIRST, SECOND = (OPERATORS[name].formula for name in ATTENTION)


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(-99, 99, shape, dtype=torch.int8)


@pytest.mark.parametrize("layout", ["BSND", "BNSD", "BSH", "TND"])
def test_an_int8_query_has_a_scale_of_each_token_and_head(layout: str) -> None:
    """Scores are the scales' product times that of the codes and the rotary parts, as of operands brought back before."""
    query, key, scale = _codes(2, 3, 4, 8), _codes(2, 5, 1, 8), torch.rand(2, 3, 4) / 50
    rope, key_rope = torch.randn(2, 3, 4, 2).bfloat16(), torch.randn(2, 5, 1, 2).bfloat16()
    form = {
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2).contiguous(),
        "BSH": lambda x: x.flatten(2),
        "TND": lambda x: x.flatten(0, 1),
    }[layout]
    kwargs: dict[str, Any] = {"num_query_heads": 4, "num_key_value_heads": 1, "input_layout": layout}
    if layout == "TND":
        kwargs |= {"actual_seq_qlen": [3, 6], "actual_seq_kvlen": [5, 10]}
    codes = [form(part) for part in (query, key, key)]
    scales = {
        "dequant_scale_query": scale if layout == "BSH" else form(scale.unsqueeze(-1)).squeeze(-1),
        "dequant_scale_key": torch.tensor([0.02]),
        "dequant_scale_value": torch.tensor([0.5]),
        "query_rope": form(rope),
        "key_rope": form(key_rope),
        "query_quant_mode": 3,
    }
    found, _ = SECOND(*codes, **scales, **kwargs)
    plain = [query * scale.unsqueeze(-1), key * 0.02, key * 0.5, rope * scale.unsqueeze(-1), key_rope * 0.02]
    plain = [form(part.float()) for part in plain]
    expected, _ = SECOND(*plain[:3], query_rope=plain[3], key_rope=plain[4], **kwargs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16())
    assert_same_metadata(ATTENTION[1], *codes, **scales, **kwargs)


@pytest.mark.parametrize(("layout", "shape"), [("BNSD", (1, 4, 3, 8)), ("BSND", (1, 3, 4, 8)), ("NSD", (4, 3, 8))])
def test_the_numbers_of_heads_are_those_of_the_shapes(layout: str, shape: tuple[int, ...]) -> None:
    """Of the query and, without pages, of the keys; layouts that join heads cannot tell."""
    given = [torch.randn(shape) for _ in range(3)]
    for formula, name in ((FIRST, "num_heads"), (SECOND, "num_query_heads")):
        with pytest.raises(RefusedArgumentError, match=rf"{name} should be 4.*161002"):
            formula(*given, **{name: 2}, input_layout=layout)
        with pytest.raises(RefusedArgumentError, match=r"num_key_value_heads should be 4"):
            formula(*given, **{name: 4}, num_key_value_heads=2, input_layout=layout)
        formula(*given, **{name: 4}, input_layout=layout)


def test_quantised_keys_beside_a_floating_query_have_no_rotary_part() -> None:
    """The scale of the codes is not the rotary part's, so the device does not take them together; nor codes without scales."""
    query, codes, rope = torch.randn(1, 1, 8), _codes(1, 4, 8), torch.randn(1, 1, 2)
    scales = {"dequant_scale_key": torch.ones(1), "dequant_scale_value": torch.ones(1)}
    with pytest.raises(RefusedArgumentError, match="key_rope"):
        SECOND(query, codes, codes, query_rope=rope, key_rope=torch.randn(1, 4, 2), **scales)
    with pytest.raises(UnsupportedArgumentError, match=r"query=torch\.float32"):
        SECOND(query, codes, codes, dequant_scale_query=torch.ones(1, 1, 1), **scales)
    with pytest.raises(RefusedArgumentError, match="one number"):
        SECOND(
            codes,
            codes,
            codes,
            dequant_scale_query=torch.ones(1, 4, 1),
            **scales | {"dequant_scale_key": torch.ones(8)},
        )


@pytest.mark.parametrize("paged", [False, True])
def test_int4_keys_and_values_come_eight_in_a_word(paged: bool) -> None:
    """Packed codes give what the same codes give in int8, side by side and in pages."""
    key, value = (torch.randint(-8, 8, (2, 4, 16), dtype=torch.int8) for _ in range(2))
    kwargs: dict[str, Any] = {"num_heads": 2, "num_key_value_heads": 1, "antiquant_scale": torch.rand(2, 16)}
    kwargs |= {"antiquant_offset": torch.rand(2, 16), "actual_seq_lengths_kv": [3, 4]}
    if paged:
        kwargs |= {"block_table": torch.tensor([[1], [0]], dtype=torch.int32), "block_size": 4}
    query, words = torch.randn(2, 1, 32), [pack("test", codes) for codes in (key, value)]
    torch.testing.assert_close(FIRST(query, *words, **kwargs)[0], FIRST(query, key, value, **kwargs)[0])
    assert_same_metadata(ATTENTION[0], query, *words, **kwargs)


def test_nz_pages_have_rotary_parts_in_nz() -> None:
    """[blocks, N, D/16, size, 16], and the rotary parts likewise, are the caches [blocks, N, size, D]."""
    query, key, rope, key_rope = (
        torch.randn(2, 4, 1, 32),
        torch.randn(3, 1, 4, 32),
        torch.randn(2, 4, 1, 16),
        torch.randn(3, 1, 4, 16),
    )
    kwargs = {
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "input_layout": "BNSD",
        "block_size": 4,
        "query_rope": rope,
    }
    kwargs |= {"block_table": torch.tensor([[1, 0], [2, 0]], dtype=torch.int32), "actual_seq_kvlen": [7, 2]}
    expected, _ = SECOND(query, key, key, key_rope=key_rope, **kwargs)
    nz = [part.unflatten(-1, (-1, 16)).transpose(2, 3).contiguous() for part in (key, key_rope)]
    found, _ = SECOND(query, nz[0], nz[0], key_rope=nz[1], **kwargs)
    torch.testing.assert_close(found, expected)


def test_padding_stands_behind_the_rows_that_count() -> None:
    """Rows and keys that end before the padding are attended as if they stood alone; the other rows are 0."""
    query, key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    kwargs = {"num_heads": 2, "input_layout": "BNSD", "sparse_mode": 3}
    sizes = {"query_padding_size": torch.tensor([1]), "kv_padding_size": torch.tensor([2])}
    lengths = {"actual_seq_lengths": [3, 2], "actual_seq_lengths_kv": [4, 5]}
    found, _ = FIRST(query, key, value, **sizes, **lengths, **kwargs)
    for b, (rows, columns) in enumerate(((slice(1, 4), slice(1, 5)), (slice(2, 4), slice(5)))):
        alone, _ = FIRST(query[b : b + 1, :, rows], *(part[b : b + 1, :, columns] for part in (key, value)), **kwargs)
        torch.testing.assert_close(found[b : b + 1, :, rows], alone)
        assert found[b].count_nonzero() == alone.numel()
    with pytest.raises(RefusedArgumentError, match="at most 2"):
        FIRST(query, key, value, query_padding_size=torch.tensor([3]), **lengths, **kwargs)
    step = OPERATORS["npu::npu_incre_flash_attention"].formula
    alone = {"num_heads": 2, "input_layout": "BNSD", "actual_seq_lengths": [6, 6]}
    assert not step(query[:, :, :1], key, value, kv_padding_size=torch.tensor([2]), **alone).any()


@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_a_shared_prefix_stands_before_all_keys(layout: str) -> None:
    """Two rows of the prefix, then the sequence's own, with the mask's columns in that order."""
    query, key, value, more, much = (torch.randn(b, 2, rows, 8) for b, rows in ((2, 3), (2, 4), (2, 4), (1, 5), (1, 5)))
    mask, lengths = torch.rand(2, 1, 3, 6) > 0.5, {"actual_seq_lengths_kv": [4, 4]}
    form = {"BNSD": lambda x: x, "BSH": lambda x: x.transpose(1, 2).flatten(2)}[layout]
    kwargs = {"num_heads": 2, "input_layout": layout, "atten_mask": mask, "sparse_mode": 1, "softmax_lse_flag": True}
    prefix = {"key_shared_prefix": form(more), "value_shared_prefix": form(much), "actual_shared_prefix_len": [2]}
    found = FIRST(*map(form, (query, key, value)), **prefix, **lengths, **kwargs)
    whole = [torch.cat([part[:, :, :2].expand(2, -1, -1, -1), own], 2) for part, own in ((more, key), (much, value))]
    expected = FIRST(*map(form, (query, *whole)), **kwargs)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RefusedArgumentError, match="both or neither"):
        FIRST(query, key, value, key_shared_prefix=more, num_heads=2, input_layout="BNSD")
    with pytest.raises(RefusedArgumentError, match="0 to 5"):
        FIRST(query, key, value, **prefix | {"actual_shared_prefix_len": [6]}, **kwargs)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_a_tree_of_drafted_tokens(layout: str) -> None:
    """Each drafted token sees all keys before the draft, and of the draft what its row of the mask leaves."""
    rows, columns = [2, 3], [4, 3]
    query, key, rope, key_rope = (
        torch.randn(2, 3, 2, 8),
        torch.randn(2, 4, 1, 8),
        torch.randn(2, 3, 2, 2),
        torch.randn(2, 4, 1, 2),
    )
    trees = [~torch.tensor([[1, 0], [0, 1]]).bool(), ~torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()]
    kwargs: dict[str, Any] = {"num_query_heads": 2, "num_key_value_heads": 1, "input_layout": layout, "sparse_mode": 9}
    if layout == "TND":
        query, rope = (torch.cat([part[b, :count] for b, count in enumerate(rows)]) for part in (query, rope))
        packed = [torch.cat([part[b, :count] for b, count in enumerate(columns)]) for part in (key, key_rope)]
        mask, lengths = torch.cat([tree.flatten() for tree in trees]), ([2, 5], [4, 7])
    else:
        packed, lengths = [key, key_rope], (rows, columns)
        mask = torch.stack(
            [torch.nn.functional.pad(tree, (0, 3 - len(tree), 0, 3 - len(tree)), value=True) for tree in trees]
        )
    kwargs |= {"actual_seq_qlen": lengths[0], "actual_seq_kvlen": lengths[1], "query_rope": rope, "key_rope": packed[1]}
    found, _ = SECOND(query, packed[0], packed[0], atten_mask=mask, **kwargs)
    start = 0
    for b, tree in enumerate(trees):
        q, r = (part[start : start + rows[b]] if layout == "TND" else part[b, : rows[b]] for part in (query, rope))
        seen = torch.cat([torch.ones(rows[b], columns[b] - rows[b]).bool(), ~tree], 1)
        k, keys = key[b, : columns[b], 0], torch.cat([key[b, : columns[b], 0], key_rope[b, : columns[b], 0]], 1)
        scores = torch.cat([q, r], -1).transpose(0, 1) @ keys.T
        expected = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ k
        part = found[start : start + rows[b]] if layout == "TND" else found[b, : rows[b]]
        torch.testing.assert_close(part, expected.transpose(0, 1))
        start += rows[b]
    with pytest.raises(RefusedArgumentError, match="sparse_mode"):
        SECOND(query, packed[0], packed[0], **kwargs)


def test_layout_nsd_is_one_sequence() -> None:
    """[N, S, D] is [1, N, S, D]."""
    query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    kwargs = {"num_heads": 2, "softmax_lse_flag": True}
    found = FIRST(query, key, key, input_layout="NSD", **kwargs)
    expected = FIRST(query[None], key[None], key[None], input_layout="BNSD", **kwargs)
    torch.testing.assert_close(found[0], expected[0][0])
    torch.testing.assert_close(found[1], expected[1])
    assert_same_metadata(ATTENTION[0], query, key, key, input_layout="NSD", **kwargs)


OF_INT8 = {
    "npu_fused_infer_attention_score": (("dequant_scale1", "quant_scale1", "dequant_scale2"), "scale"),
    "npu_incre_flash_attention": (("dequant_scale1", "quant_scale1", "dequant_scale2"), "scale_value"),
    "npu_prompt_flash_attention": (("deq_scale1", "quant_scale1", "deq_scale2"), "scale_value"),
}


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("operator", OF_INT8)
def test_attention_wholly_in_int8(operator: str) -> None:
    """Exponentials are rounded before they are divided by their sum; scales of float32, and packed in 64 bits."""
    formula, (names, scale) = OPERATORS[f"npu::{operator}"].formula, OF_INT8[operator]
    query, key, value = _codes(2, 3, 1, 16), _codes(2, 3, 9, 16), _codes(2, 3, 9, 16)
    numbers = [torch.tensor([0.0004]), torch.tensor([100.0]), torch.tensor([0.02])]
    given = dict(zip(names, numbers, strict=True))
    how: dict[str, Any] = {"num_heads": 3, "input_layout": "BNSD", scale: 0.25}
    found = _first(formula(query, key, value, **given, **how))
    scores = query.float() @ key.float().mT * 0.0004 * 0.25
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    sums = exponentials.sum(-1, keepdim=True)
    expected = (exponentials * 100).round() @ value.float() * 0.02 / sums
    assert (exponentials * 100 / sums).round().ne((exponentials * 100).round() / sums).any()
    torch.testing.assert_close(found, expected.half())
    stored = _first(formula(query, key, value, **given, quant_scale2=torch.tensor([2.0]), **how))
    torch.testing.assert_close(stored, (expected * 2).round().clamp(-128, 127).to(torch.int8), atol=1, rtol=0)
    packed = {name: number.view(torch.int32).long() for name, number in given.items() if name != "quant_scale1"}
    assert torch.equal(_first(formula(query, key, value, **given | packed, **how)), found)
    with pytest.raises(RefusedArgumentError, match=names[2]):
        formula(query, key, value, **{names[0]: numbers[0], names[1]: numbers[1]}, **how)
    with pytest.raises(RefusedArgumentError, match="one number for the whole tensor"):
        formula(query, key, value, **given | {names[0]: torch.ones(2)}, **how)
    with pytest.raises(RefusedArgumentError, match=r"wholly in int8|of the dtype of query"):
        formula(query, key.float(), value, **given, **how)


def test_equal_keys_keep_their_weight_in_int8() -> None:
    """As op-plugin's test has it: of 2,048 equal keys each keeps a share, where shares rounded after the division are all 0."""
    ones = {name: torch.ones(1) for name in OF_INT8["npu_fused_infer_attention_score"][0]}
    operand = torch.ones(1, 1, 2048, 8, dtype=torch.int8)
    output, _ = FIRST(operand[:, :, :2], operand, operand, input_layout="BNSD", quant_scale2=torch.ones(1), **ones)
    assert output.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_out_dtype_names_the_dtype_of_the_result(dtype: torch.dtype) -> None:
    """8 bits with a scale of the result, else a floating dtype of an int8 query; the meta function says the same."""
    query, key = torch.randn(1, 2, 16).half(), torch.randn(1, 4, 16).half()
    plain, _ = SECOND(query, key, key)
    if dtype == torch.bfloat16:
        scales = {name: torch.tensor([0.02]) for name in ("dequant_scale_key", "dequant_scale_value")}
        scales |= {"dequant_scale_query": torch.rand(1, 2, 1), "out_dtype": dtype}
        operands = (_codes(1, 2, 16), _codes(1, 4, 16), _codes(1, 4, 16))
        expected = SECOND(*operands, **scales | {"out_dtype": None})[0].bfloat16()
    else:
        scales, operands = {"quant_scale_out": torch.tensor([9.0]), "out_dtype": dtype}, (query, key, key)
        expected = (plain.float() * 9).to(dtype) if dtype.is_floating_point else (plain.float() * 9).round().to(dtype)
    found, _ = SECOND(*operands, **scales)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.25, atol=1.0)
    assert_same_metadata(ATTENTION[1], *operands, **scales)
    with pytest.raises(UnsupportedArgumentError, match="out_dtype"):
        SECOND(query, key, key, out_dtype=torch.float8_e5m2)
