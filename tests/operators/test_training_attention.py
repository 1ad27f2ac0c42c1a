"""The reference of attention in training: every layout gives torch's values and gradients, in float64."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")


def stored(heads: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in a layout."""
    if layout == "BNSD":
        return heads
    rows = heads.transpose(1, 2)
    if layout == "BSND":
        return rows.contiguous()
    return rows.flatten(2) if layout == "BSH" else rows.flatten(2).transpose(0, 1).contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [8, 4], ids=["as wide", "narrower values"])
def test_layouts_hold_the_same_attention(layout: str, key_heads: int, width: int) -> None:
    """Shared heads, and values narrower than keys, as latent attention has them."""
    q, k = torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, key_heads, 5, 8, dtype=torch.float64)
    v = torch.randn(2, key_heads, 5, width, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, scale=0.3, enable_gqa=True)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    given = [stored(tensor.detach(), layout) for tensor in leaves]
    output = OPERATORS["npu::npu_fusion_attention_v3"].formula(*given, 4, layout, scale=0.3)[0]
    torch.testing.assert_close(output, stored(expected.detach(), layout), rtol=1e-12, atol=1e-12)
    found = OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(
        *given, stored(upstream, layout), 4, layout, scale_value=0.3
    )
    for have, want in zip(found, gradients, strict=False):
        torch.testing.assert_close(have, stored(want, layout), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_broadcasts(layout: str) -> None:
    """Torch takes keys and values of one batch entry for all queries; the device does not."""
    q, k, v = (torch.randn(2, 4, 3, 8) for _ in range(3))
    for key, value in ((k, v[:1]), (k[:1], v[:1]), (k, v[:, :, :1])):
        with pytest.raises(RuntimeError, match=r"value should be of the shape of key|key's batch should be"):
            OPERATORS["npu::npu_fusion_attention"].formula(*(stored(one, layout) for one in (q, key, value)), 4, layout)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_see_nothing_are_zero_and_rows_of_nan_are_nan(value: float) -> None:
    """As in torch's safe softmax: NaN is not taken for a row without scores."""
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3))
    q[0, 0, 1] = value
    k[0, 0, 0] = k[0, 0, 1] = k[0, 0, 2] = torch.rand(4) + 0.1  # all scores of a row of -inf are -inf
    expected = torch.ops.aten._safe_softmax(q @ k.mT * 0.5, -1) @ v
    output = OPERATORS["npu::npu_fusion_attention_v3"].formula(q, k, v, 2, "BNSD", scale=0.5)[0]
    torch.testing.assert_close(output, expected, equal_nan=True)
    assert bool((output[0, 0, 1] == 0).all() if value == -torch.inf else output[0, 0, 1].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_keeps_what_it_says_and_the_gradient_knows(layout: str) -> None:
    """With identity values the output is the dropped weights: 0 or P / keep_prob; the gradient is that of these weights."""
    keep, heads, rows = 0.7, 4, 64
    leaves = [torch.randn(2, heads, rows, rows, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves.append(torch.eye(rows, dtype=torch.float64).expand(2, heads, rows, rows).clone().requires_grad_())
    q, k, v = leaves
    weights = torch.softmax(q @ k.mT * 0.1, -1)
    given = [stored(tensor.detach(), layout) for tensor in leaves]
    torch.manual_seed(5)
    output, maximum, total, _, seed, _ = OPERATORS["npu::npu_fusion_attention_v3"].formula(
        *given, heads, layout, scale=0.1, keep_prob=keep
    )
    dropped = weights.detach() / keep
    flat = stored(dropped, layout)
    torch.testing.assert_close(output, torch.where(output == 0, 0.0, flat), rtol=1e-12, atol=1e-12)
    assert 0.68 < (output != 0).double().mean() < 0.72  # five standard deviations are 0.013
    plain = OPERATORS["npu::npu_fusion_attention_v3"].formula(*given, heads, layout, scale=0.1)
    torch.testing.assert_close([maximum, total], list(plain[1:3]), rtol=0, atol=0)  # dropping comes after the softmax
    as_heads = output if layout == "BNSD" else _heads_of(output, layout, heads)
    upstream = torch.randn(2, heads, rows, rows, dtype=torch.float64)
    found = OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(
        *given, stored(upstream, layout), heads, layout, scale_value=0.1, keep_prob=keep, seed=seed
    )
    expected = torch.autograd.grad((weights * (as_heads != 0) / keep) @ v, leaves, upstream)
    for have, want in zip(found, expected, strict=False):
        torch.testing.assert_close(have, stored(want, layout), rtol=1e-10, atol=1e-10)


def _heads_of(output: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """The inverse of `stored`."""
    if layout == "SBH":
        output = output.transpose(0, 1)
    rows = output if layout == "BSND" else output.unflatten(-1, (heads, -1))
    return rows.transpose(1, 2)


def test_dropout_needs_a_probability_and_the_gradient_its_seed() -> None:
    """Values that mean nothing are refused by name."""
    x = torch.randn(1, 2, 4)
    with pytest.raises(ValueError, match="keep_prob must be above 0"):
        OPERATORS["npu::npu_fusion_attention_v3"].formula(x, x, x, 1, "BSH", keep_prob=0.0)
    with pytest.raises(ValueError, match="needs the seed"):
        OPERATORS["npu::npu_fusion_attention_grad_v3"].formula(x, x, x, x, 1, "BSH", keep_prob=0.5)


def formula(name: str, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """The formula of ``npu::npu_fusion_name`` called with these arguments."""
    return OPERATORS[f"npu::npu_fusion_{name}"].formula(*args, **kwargs)


def seen(mode: int, rows: int, columns: int, *, first: bool, last: bool) -> torch.Tensor:
    """What a sparse mode lets through of one of several sequences, with a band of 1 behind and 2 ahead, and a prefix of 2."""
    ahead = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
    at_end = ahead - (columns - rows)
    band = (at_end >= -1) & (at_end <= 2)
    by_mode = {2: ahead <= 0, 3: at_end <= 0, 4: band, 6: (at_end <= 0) | (torch.arange(columns) < 2)}
    by_mode |= {7: band if last else at_end <= 0, 8: band if first else ahead <= 0}
    return by_mode[mode]


@pytest.mark.parametrize("mode", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_packed_sequences_are_attended_each_with_its_mask(mode: int, version: str) -> None:
    """Layout TND: output, statistics and gradients are those of each sequence alone, in either layout of the statistics."""
    rows, columns = [3, 2, 4], [5, 4, 4]
    leaves = [torch.randn(total, n, 8).double().requires_grad_() for total, n in ((9, 4), (13, 2), (13, 2))]
    parts = zip(leaves[0].split(rows), leaves[1].split(columns), leaves[2].split(columns), strict=True)
    expected = []
    for b, (q, k, v) in enumerate(parts):
        mask = seen(mode, rows[b], columns[b], first=b == 0, last=b == 2)
        heads = (operand.transpose(0, 1) for operand in (q, k, v))
        one = torch.nn.functional.scaled_dot_product_attention(*heads, mask, scale=0.3, enable_gqa=True)
        expected.append(one.transpose(0, 1))
    expected = torch.cat(expected)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    before, after = ("pre_tokens", "next_tokens") if version == "_v2" else ("pre_tockens", "next_tockens")
    how = {"sparse_mode": mode, before: 1, after: 2, "prefix": [2, 2, 2], "atten_mask": torch.ones(1, 1)}
    ends = [torch.tensor(lengths).cumsum(0) for lengths in (rows, columns)]
    how |= {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    if version != "_v3":
        how |= {name: how[name].tolist() for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    given = [leaf.detach() for leaf in leaves]
    kept = {}
    for layout in ("", "TND"):
        output, largest, total, *_ = formula(
            f"attention{version}", *given, 4, "TND", scale=0.3, softmax_layout=layout, **how
        )
        torch.testing.assert_close(output, expected.detach())
        saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output, "softmax_layout": layout}
        found = formula(f"attention_grad{version}", *given, upstream, 4, "TND", scale_value=0.3, **saved, **how)
        torch.testing.assert_close(found[:3], gradients)
        kept[layout] = largest
    assert torch.equal(kept[""][:3].view(4, 3, 8).transpose(0, 1), kept["TND"][:3])


def test_a_sink_takes_a_share_and_has_a_gradient() -> None:
    """As one more key for each head, whose value is 0."""
    q, k, v = (torch.randn(2, 2, 3, 8).double().requires_grad_() for _ in range(3))
    sink = torch.randn(2).double().requires_grad_()
    scores = torch.cat((q @ k.mT * 0.3, sink.view(1, 2, 1, 1).expand(2, 2, 3, 1)), -1)
    expected = torch.softmax(scores, -1)[..., :3] @ v
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v, sink), upstream)
    given = [leaf.detach() for leaf in (q, k, v)]
    output, largest, total, *_ = formula("attention", *given, 2, "BNSD", scale=0.3, sink=sink.detach())
    torch.testing.assert_close(output, expected.detach())
    saved = {"softmax_max": largest.double(), "softmax_sum": total.double(), "attention_in": output}
    found = formula("attention_grad", *given, upstream, 2, "BNSD", scale_value=0.3, sink=sink.detach(), **saved)
    torch.testing.assert_close((*found[:3], found[4]), gradients)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_rotary_parts_are_joined_head_by_head(layout: str) -> None:
    """The second version: scores of both parts are added; each part has its own gradient; ``pse_type`` 0 is not scaled."""
    q, k, v = (torch.randn(2, n, 3, 8).double() for n in (4, 2, 2))
    q_rope, k_rope, pse = (
        torch.randn(2, 4, 3, 4).double(),
        torch.randn(2, 2, 3, 4).double(),
        torch.randn(2, 4, 3, 3).double(),
    )
    leaves = [leaf.requires_grad_() for leaf in (q, k, v, q_rope, k_rope)]
    joined = torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1)
    expected = torch.nn.functional.scaled_dot_product_attention(*joined, v, pse, scale=0.3, enable_gqa=True)
    upstream = torch.randn_like(expected)
    gradients = [stored(each, layout) for each in torch.autograd.grad(expected, leaves, upstream)]
    given = [stored(leaf.detach(), layout) for leaf in leaves]
    how = {"query_rope": given[3], "key_rope": given[4], "pse": pse, "pse_type": 0}
    output, *_ = formula("attention_v2", *given[:3], 4, layout, scale=0.3, **how)
    torch.testing.assert_close(output, stored(expected.detach(), layout))
    found = formula("attention_grad_v2", *given[:3], stored(upstream, layout), 4, layout, scale_value=0.3, **how)
    torch.testing.assert_close([*found[:3], *found[4:6]], gradients)


def test_statistics_of_the_forward_decide_the_weights() -> None:
    """Ring attention: with the statistics and the output of all keys, a block's gradients are its share of the whole."""
    q, k, v, upstream = (torch.randn(1, 2, 4, 8).double() for _ in range(4))
    output, largest, total, *_ = formula("attention", q, k, v, 2, "BNSD", scale=0.3)
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output}
    whole = formula("attention_grad", q, k, v, upstream, 2, "BNSD", scale_value=0.3, **saved)
    blocks = [
        formula("attention_grad", q, k[:, :, part], v[:, :, part], upstream, 2, "BNSD", scale_value=0.3, **saved)
        for part in (slice(0, 3), slice(3, 4))
    ]
    torch.testing.assert_close(blocks[0][0] + blocks[1][0], whole[0])
    torch.testing.assert_close(torch.cat([block[1] for block in blocks], 2), whole[1])


def test_a_given_mask_of_bits_drops_what_it_says() -> None:
    """Bit by bit from the lowest: kept weights are divided by ``keep_prob``, and the numbers given are returned."""
    q, k, eye = (
        torch.randn(1, 1, 2, 4).double(),
        torch.randn(1, 1, 4, 4).double(),
        torch.eye(4).double().view(1, 1, 4, 4),
    )
    bits = torch.tensor([0b10010110] + [0] * 15, dtype=torch.uint8)
    result = formula("attention", q, k, eye, 1, "BNSD", keep_prob=0.5, dropout_mask=bits, seed=7, offset=3)
    kept = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]]).double()
    torch.testing.assert_close(result[0], torch.softmax(q @ k.mT, -1) * kept * 2)
    assert result[4:6] == (7, 3)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND"])
def test_the_weights_are_counted(layout: str) -> None:
    """Two sequences of 3 rows over 5 with 4 heads have 120 weights, with dropout or without; packed ones count by their lengths."""
    q, k, v = (stored(torch.randn(2, 4, rows, 8), layout) for rows in (3, 5, 5))
    assert formula("attention", q, k, v, 4, layout)[6] == formula("attention_v2", q, k, v, 4, layout)[6] == 120
    assert formula("attention", q, k, v, 4, layout, keep_prob=0.5)[6] == 120
    packed = [torch.randn(rows, 4, 8) for rows in (6, 9, 9)]
    lengths = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [4, 9]}
    assert formula("attention", *packed, 4, "TND", **lengths)[6] == 4 * (2 * 4 + 4 * 5)
