"""Examples for lifting: norms, rotary embeddings, activations, attention, masks, quantisation and others, spelled at random.

Each part of a spelling is drawn from the ways in which programs write it. One example in three is a near-miss: one part is
wrong in a way that changes what is computed. A spelling must be lifted, or be refused because the operator is farther from
float64; a near-miss must not be lifted. Either way the program computes what it did, in eager mode and by the oracle's judge.
One example in three is lifted with ``exact``: then no bit may differ from eager mode, in norms of many rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from npugraph_ex.lifting import judging
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case, Outcome, check

_REFUSED = ("farther from float64", "infinite or NaN", "elements are not eager mode's", "no documented order")
"""What the judge says of a spelling that the operator would be worse than, or other than."""
_ROWS, _MANY_ROWS = 4, 4096
"""A norm in float16 that is nearly exact differs from eager mode in one element of 10,000."""
_OF_16_BITS = (
    "lift_attention", "lift_shared_heads", "lift_gating", "lift_sigmoid_gating", "lift_dynamic_quant", "lift_quant_matmul",
    "lift_weight_quant", "lift_norm_rope_cache",
)  # fmt: skip
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Spelling:
    """A drawn program.

    Attributes:
        form: of lifting, which it spells.
        lines: of its body; the last one is the result.
        shapes: of its inputs x0, x1, ...
        near_miss: the part that is wrong; empty for a spelling.
        alone: whether the operator would save nothing if something on the way had another user.
    """

    form: str
    lines: tuple[str, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    near_miss: str = ""
    alone: bool = False


def _norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-5, 1e-2))
    miss = draw.choice(("epsilon", "dimension", "mean", "size", "square")) if wrong else ""
    wide = draw.choice(("x0.float()", "x0.to(torch.float32)", "x0"))
    of = "(wide + 1)" if miss == "square" else "wide"
    square = draw.choice((f"{of}.pow(2)", f"{of} * {of}", f"torch.square({of})", f"{of} ** 2"))
    dim = 0 if miss == "dimension" else -1
    divisor = {"mean": "1", "size": f"{width - 1}"}.get(miss, f"{width}")
    means = [f"square.sum({dim}, keepdim=True) / {divisor}"]
    if miss not in {"mean", "size"}:
        means += [f"square.mean({dim}, keepdim=True)", f"square.mean({dim}).unsqueeze({dim})"]
    under = draw.choice((f"mean + {epsilon}", f"{epsilon} + mean"))
    if miss == "epsilon":
        root = f"1 / (torch.sqrt(mean) + {epsilon})"
    else:
        root = draw.choice(
            (
                f"torch.rsqrt({under})",
                f"1 / torch.sqrt({under})",
                f"({under}).pow(-0.5)",
                f"({under}).sqrt().reciprocal()",
            )
        )
    normed = draw.choice(("wide * root", "root * wide"))
    ends = (
        "x1 * normed.to(x0.dtype)",
        "(normed * (x1).float()).to(x0.dtype)",
        "(normed * (1.0 + x1)).to(x0.dtype)",
    )
    lines = (
        f"wide = {wide}",
        f"square = {square}",
        f"mean = {draw.choice(means)}",
        f"root = {root}",
        f"normed = {normed}",
        draw.choice(ends),
    )
    return Spelling("lift_rms_norm", lines, ((rows, 3, width), (width,)), miss)


def _rotary(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    width = draw.choice((8, 16))
    half = width // 2
    miss = draw.choice(("sign", "order", "source", "pairs")) if wrong else ""
    cut = draw.choice(("x.chunk(2, dim=-1)", f"x.split({half}, -1)", f"(x[..., :{half}], x[..., {half}:])"))
    second = draw.choice(("-second", "second * -1", "second.neg()"))
    joined = {
        "sign": "torch.cat((second, -first), dim=-1)",
        "order": "torch.cat((-first, second), dim=-1)",
        "source": f"torch.cat(({second}, (first + 1)), dim=-1)",
        "pairs": "torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)",
    }.get(miss, f"torch.cat(({second}, first), dim=-1)")
    if not miss and draw.random() < 0.3:
        joined = "torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)"
    cast = draw.choice(("", ".float()"))
    terms = [f"x * x1{cast}", f"turned * x2{cast}"]
    draw.shuffle(terms)
    lines = (f"x = x0{cast}", f"first, second = {cut}", f"turned = {joined}", f"({' + '.join(terms)}).to(x0.dtype)")
    return Spelling("lift_rotary", lines, ((rows, 3, 2, width), (rows, 3, 1, width), (rows, 3, 1, width)), miss)


def _activation(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    miss = "constant" if wrong else ""
    slope, cubic = ("1.71", "0.0449") if wrong else ("1.702", "0.044715")
    x3 = draw.choice(("torch.pow(x0, 3.0)", "x0 * x0 * x0", "x0 ** 3"))
    inner = draw.choice((f"0.7978845608 * (x0 + {cubic} * ({x3}))", f"x0 * 0.79788456 * (1 + {cubic} * x0 * x0)"))
    tanh = draw.choice((f"(1.0 + torch.tanh({inner}))", f"(torch.tanh({inner}) + 1)"))
    ends = (
        draw.choice((f"0.5 * x0 * {tanh}", f"x0 * (0.5 * {tanh})", f"x0 * {tanh} / 2")),
        draw.choice(
            (
                f"x0 * torch.sigmoid({slope} * x0)",
                f"torch.sigmoid(x0 * {slope}) * x0",
                f"x0 / (1 + torch.exp(-{slope} * x0))",
            )
        ),
    )
    return Spelling("lift_activation", (draw.choice(ends),), ((rows, 24),), miss)


def _gated(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    miss = draw.choice(("gate", "halves")) if wrong else ""
    cut = {"halves": "x0[..., 1:13], x0[..., 12:]"}.get(
        miss, draw.choice(("x0.chunk(2, -1)", "x0[..., :12], x0[..., 12:]"))
    )
    gate, up = ("second", "first") if miss == "gate" else ("first", "second")
    active = draw.choice((f"torch.nn.functional.silu({gate})", f"{gate} * torch.sigmoid({gate})"))
    return Spelling(
        "lift_swiglu",
        (f"first, second = {cut}", draw.choice((f"({active}) * {up}", f"{up} * ({active})"))),
        ((rows, 24),),
        miss,
    )


def _group_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    groups, epsilon = draw.choice((2, 3, 6)), draw.choice((1e-6, 1e-2))
    miss = draw.choice(("activation", "weight")) if wrong else ""
    weight, bias = ("None", "None") if miss == "weight" else ("x1", "x2")
    normed = f"torch.nn.functional.group_norm(x0, {groups}, {weight}, {bias}, {epsilon})"
    ends = ("torch.nn.functional.silu(normed)", "normed * torch.sigmoid(normed)")
    end = "torch.relu(normed)" if miss == "activation" else draw.choice(ends)
    return Spelling("lift_group_norm_silu", (f"normed = {normed}", end), ((rows, 6, 5), (6,), (6,)), miss, alone=True)


def _norm_of_a_sum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-12, 1e-5, 1e-2))
    miss = draw.choice(("sum", "bias", "operand", "dimensions")) if wrong else ""
    total = {"sum": "torch.add(x0, x1, alpha=2)", "operand": "x0 + x1[:1]"}.get(
        miss, draw.choice(("x0 + x1", "x1 + x0", "torch.add(x1, x0)"))
    )
    size, weight, bias = f"({width},)", "x2", "None" if miss == "bias" else "x3"
    if miss == "dimensions":
        size, weight, bias = (
            f"(3, {width})",
            f"x2.expand(3, {width}).contiguous()",
            f"x3.expand(3, {width}).contiguous()",
        )
    norm = f"torch.nn.functional.layer_norm(total, {size}, {weight}, {bias}, {epsilon})"
    end = draw.choice(("normed", "normed + total", "torch.relu(total) * normed"))
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 3, width), (rows, 3, width), (width,), (width,))
    return Spelling("lift_add_layer_norm", (f"total = {total}", f"normed = {norm}", end), shapes, miss)


def _biased_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    heads, width, keys = draw.choice((1, 2)), draw.choice((4, 16)), draw.choice((3, 5))
    miss = draw.choice(("softmax", "over", "keys")) if wrong else ""
    scale = draw.choice((1.0, 0.25, 0.3))
    bias = draw.choice(("x3", "x3[:, :1]", "x3[:1]"))
    attended = f"torch.nn.functional.scaled_dot_product_attention(x0, x1, x2, attn_mask={bias}, scale={scale})"
    if wrong or draw.random() < 0.5:
        right = "x1[:, :, ::2].repeat(1, 1, 2, 1)[:, :, :KEYS]" if miss == "keys" else "x1"
        right = right.replace("KEYS", str(keys))
        scores = draw.choice((f"(x0 * {scale}) @ {right}.mT", f"x0 @ {right}.transpose(-1, -2) * {scale}"))
        over = -2 if miss == "over" else -1
        softmax = "torch.softmax" if miss in {"softmax", "keys"} else "torch.ops.aten._safe_softmax"
        attended = f"{softmax}(({scores}) + {bias}, {over}) @ x2"
    shapes: tuple[tuple[int | str, ...], ...] = (
        (rows, heads, 3, width), (rows, heads, keys, width), (rows, heads, keys, width), (rows, heads, 3, keys),
    )  # fmt: skip
    return Spelling("lift_attention", (f"attended = {attended}", "attended"), shapes, miss)


def _router(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """The result does not show which of equal experts is chosen."""
    experts, k = draw.choice((4, 8)), draw.choice((2, 3))
    miss = draw.choice(("over", "sum", "rank", "smallest", "twice")) if wrong else ""
    behind = miss == "twice" or (miss not in {"over", "sum"} and draw.random() < 0.3)
    over = 0 if miss == "over" else draw.choice((1, -1))
    softmax = draw.choice((f"torch.softmax(x0.float(), {over})", f"torch.softmax(x0, {over}, dtype=torch.float32)"))
    scores = "x0.float()" if behind and miss != "twice" else softmax
    ranked = "(scores * x1)" if miss == "rank" else "scores"
    largest = ", largest=False" if miss == "smallest" else ""
    gathered = draw.choice(("chosen[0]", "scores.gather(-1, chosen[1])"))
    # What is gathered in a near-miss may be a router by itself, without what is wrong.
    weights = (
        "scores.gather(-1, chosen[1])" if miss == "rank" else "chosen[0]" if miss in {"sum", "twice"} else gathered
    )
    total = (
        "weights.sum(0)"
        if miss == "sum"
        else draw.choice(("weights.sum(-1, keepdim=True)", "weights.sum(-1).unsqueeze(-1)"))
    )
    shared = draw.choice((f"weights / {total}", f"(1 / {total}) * weights", f"weights / ({total} + 1e-20)"))
    end = (
        "torch.softmax(weights, -1)"
        if behind
        else shared
        if miss == "sum"
        else draw.choice(("weights", shared, shared))
    )
    lines = (
        f"scores = {scores}",
        f"chosen = torch.topk({ranked}, {k}, dim=-1{largest})",
        f"weights = {weights}",
        f"({end}).to(x0.dtype) * x0.gather(-1, chosen[1])",
    )
    return Spelling("lift_gating", lines, ((rows, experts), (experts,)), miss, alone=end != shared)


def _sigmoid_router(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """As above: weights by a sigmoid, a choice with a bias, and in groups."""
    groups, of_each, k = draw.choice((1, 2, 4)), draw.choice((4, 8)), draw.choice((2, 3))
    experts = groups * of_each
    miss = draw.choice(("share", "bias", *(("fill", "groups", "worst") if groups > 1 else ()))) if wrong else ""
    biased = draw.choice(("scores + x1", "x1 + scores"))
    choice = "scores * x1" if miss == "bias" else biased if miss or draw.random() < 0.8 else "scores"
    lines = ["scores = torch.sigmoid(x0.float())", f"choice = {choice}"]
    if groups > 1:
        two = 3 if miss == "groups" else 2
        of_two = f"choice.view(-1, {groups}, {of_each}).topk({two}, dim=-1)[0].sum(-1)"
        best = draw.choice((of_two, f"choice.view(-1, {groups}, {of_each}).amax(-1)")) if miss != "groups" else of_two
        masks = (
            f"kept.unsqueeze(-1).expand(-1, {groups}, {of_each}).reshape(-1, {experts}).bool()",
            f"kept.bool().repeat_interleave({of_each}, 1)",
        )
        fill = "0.0" if miss == "fill" else "-torch.inf"
        worst = ", largest=False" if miss == "worst" else ""
        lines += [
            f"best = {best}",
            f"kept = torch.zeros_like(best).scatter_(1, torch.topk(best, {groups // 2}, sorted=False{worst})[1], 1)",
            f"mask = {draw.choice(masks)}",
            f"ranked = {draw.choice((f'choice.masked_fill(~mask, {fill})', f'torch.where(mask, choice, {fill})'))}",
        ]
    ranked = "ranked" if groups > 1 else "choice"
    total = draw.choice(("weights.sum(-1, keepdim=True)", "weights.sum(-1).unsqueeze(-1)"))
    over = draw.choice((total, f"({total} + 1e-20)", f"({total} + 0.01)"))
    end = "weights" if miss == "share" else draw.choice((f"weights / {over}", f"weights * (2.5 / {over})"))
    lines += [
        f"places = torch.topk({ranked}, {k}, dim=-1, sorted=False).indices",
        "weights = scores.gather(-1, places)",
        # Which place an expert has is not said by the program, so the sum alone shows it.
        f"(({end}) * x0.gather(-1, places)).sum(-1).to(x0.dtype)",
    ]
    return Spelling("lift_sigmoid_gating", tuple(lines), ((rows, experts), (experts,)), miss, alone=True)


def _loss(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Classes come from another input, and one of them may be ignored."""
    classes, ignored = draw.choice((4, 8)), draw.choice((-100, 1))
    miss = draw.choice(("over", "logarithm")) if wrong else ""
    reduction = draw.choice(("mean", "sum", "none"))
    rest = f"x1.argmax(-1), reduction='{reduction}', ignore_index={ignored}"
    logits = draw.choice(("x0.float()", "x0"))
    softmax = "torch.log_softmax(logits, 0)" if miss == "over" else "torch.log_softmax(logits, -1)"
    spelled = "torch.softmax(logits, -1).log()" if miss == "logarithm" else softmax
    ends = [f"torch.nn.functional.nll_loss({spelled}, {rest})"]
    ends += [] if miss else [f"torch.nn.functional.cross_entropy(logits, {rest})"]
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, classes), (rows, classes))
    return Spelling("lift_cross_entropy", (f"logits = {logits}", draw.choice(ends)), shapes, miss)


def _mask(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """What is wrong is a value of x0 in the mask. It is another one in each call; the numbers before it are still constant."""
    width = draw.choice((8, 16))
    start = "x0[0, 0].long()" if wrong else draw.choice(("0", "1"))
    compared = draw.choice(
        ("places[None] <= places[:, None]", "places[:, None] >= places", "(places - places[:, None]) < 1")
    )
    ends = (
        "torch.where(allowed, x0[:, None], x1).sum(1)",
        "(x0[:, None] * allowed).sum(1) + x1",
        "(x0[:, None] + x1).masked_fill(~allowed, 0).sum(1)",
    )
    lines = (
        f"places = torch.arange({width}, device=x0.device) * {start}",
        f"allowed = {compared}",
        draw.choice(ends),
    )
    return Spelling("lift_constants", lines, ((rows, width), (width,)))


def _quantised(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Dynamic quantisation. The result does not jump where a quotient lies between two whole numbers: either is right there."""
    width = draw.choice((16, 24))
    miss = draw.choice(("dimension", "floor", "source", "clamp")) if wrong else ""
    wide = draw.choice(("x0.float()", "x0"))
    of, dim = ("(wide + 1)" if miss == "source" else "wide"), (1 if miss == "dimension" else -1)
    largest = draw.choice((f"{of}.abs().amax({dim}, keepdim=True)", f"{of}.abs().max({dim}, keepdim=True)[0]"))
    most = draw.choice((127, 127, 127, 127.5, 120))
    scales = [
        f"largest.float() / {most}",
        f"largest.float() * (1 / {most})",
        f"(largest.float() / {most}).clamp(min=1e-5)",
    ]
    low, high = (-64, 63) if miss == "clamp" else draw.choice(((-128, 127), (-128 if most > 127 else -127, 127)))
    near = "floor" if miss == "floor" else "round"
    whole = draw.choice((f"quotient.{near}().clamp({low}, {high})", f"quotient.clamp({low}, {high}).{near}()"))
    lines = (
        f"wide = {wide}",
        f"largest = {largest}",
        f"scale = {draw.choice(scales)}",
        f"quotient = {draw.choice(('wide / scale', 'wide * (1.0 / scale)'))}",
        f"whole = ({whole}).to(torch.int8)",
        "(whole - x0 / scale) * torch.cos(3.141592653589793 * (x0 / scale)) + scale",
    )
    return Spelling("lift_dynamic_quant", lines, ((rows, 3, width),), miss)


def _product_of_whole_numbers(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Which whole numbers they are is seen from comparisons, which are exact."""
    columns, width = draw.choice((8, 24)), draw.choice((16, 32))
    miss = draw.choice(("wraps", "token", "number")) if wrong else ""
    cast = "" if miss == "wraps" else draw.choice((".float()", ".to(torch.int32)", ".half()"))
    factors = ["total.float()", "x2.float()", "x2.float()" if miss == "token" else "x3.float()"]
    factors += ["0.5"] if miss == "number" else []
    draw.shuffle(factors)
    ends = (
        f"({' * '.join(factors)}).to(x0.dtype)",
        f"({' * '.join(factors)}).to(x0.dtype) + x4",
        f"(x4 + {' * '.join(factors)}).to(x0.dtype)",
    )
    lines = (
        "q = (x0 > 0.5).to(torch.int8) * 5 + (x0 > -1).to(torch.int8) * 100 - 60",
        "w = (x1 > 0.5).to(torch.int8) * 50 - (x1 < -0.5).to(torch.int8) * 49",
        f"total = q{cast} @ w{cast}.t()",
        draw.choice(ends),
    )
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, width), (columns, width), (rows, 1), (columns,), (columns,))
    return Spelling("lift_quant_matmul", lines, shapes, miss)


def _biased(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    width, columns = draw.choice((8, 16)), draw.choice((4, 6))
    miss = draw.choice(("alpha", "rows")) if wrong else ""
    turned = draw.random() < 0.5
    product = draw.choice(("x0 @ {}", "torch.matmul(x0, {})")).format("x1.t()" if turned else "x1")
    bias = "x2[:1]" if miss == "rows" else "x2"
    ends = (f"{product} + {bias}", f"{bias} + {product}", f"torch.add({bias}, {product})")
    end = f"torch.add({product}, x2, alpha=2)" if miss == "alpha" else draw.choice(ends)
    weight = (columns, width) if turned else (width, columns)
    lead: tuple[int | str, ...] = draw.choice(((rows,), (rows, 3)))
    return Spelling("lift_bias", (f"({end}).to(x0.dtype)",), ((*lead, width), weight, (columns,)), miss)


def _product(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    of_numbers = draw.random() < 2 / 3
    return (_product_of_whole_numbers if of_numbers else _biased)(draw, rows, wrong)


def _cache_writes(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Keys and values in slots of two paged caches; which slots is decided by another input."""
    heads, width, blocks, size = draw.choice((1, 2)), draw.choice((4, 16)), draw.choice((3, 5)), draw.choice((2, 4))
    miss = draw.choice(("gaps", "gaps", "index", "count", "chain")) if wrong else ""
    flat = draw.choice(("view({shape})", "reshape({shape})", "flatten(0, 1)")).format(shape=f"-1, {heads}, {width}")
    value = "x1.repeat_interleave(2, 0)[::2]" if miss == "gaps" else "x1"
    slots = {"index": "slots.flip(0)", "count": "slots[:1]"}.get(miss, "slots")
    value = "x1[:1]" if miss == "count" else value
    into = "keys.reshape(x3.shape)" if miss == "chain" else "x3"
    key = draw.choice(("x0", "x0 * 2"))
    lines = (
        f"slots = x4.argsort()[:{_ROWS}]",
        f"keys = x2.{flat}.index_copy(0, slots, {key})",
        f"values = {into}.{flat}.index_copy(0, {slots}, {value})",
        draw.choice(("torch.cat((keys, values))", "keys - values", "keys.view(x2.shape) * values.view(x3.shape)")),
    )
    row, cache = (_ROWS, heads, width), (blocks, size, heads, width)
    return Spelling("lift_paged_cache", lines, (row, row, cache, cache, (blocks * size,)), miss, alone=True)


def _latent_writes(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Norm and rotary embedding of compressed keys and values, at positions of two caches."""
    miss = draw.choice(("halves", "source", "order", "index")) if wrong else ""
    cuts = {"order": "kv[..., 64:], kv[..., :64]", "source": "(kv + 1)[..., :512], kv[..., 512:]"}
    cut = cuts.get(miss, draw.choice(("kv[..., :512], kv[..., 512:]", "kv.split((512, 64), -1)")))
    pairs = draw.choice(
        ("k.view(1, 3, 32, 2).transpose(3, 2).reshape(1, 1, 3, 64)", "k.unflatten(-1, (32, 2)).mT.flatten(-2)[:, None]")
    )
    writes = [
        f"keys = x4.index_copy(2, {'places.flip(0)' if miss == 'index' else 'places'}, embedded)",
        "latents = x5.index_copy(1, places, normed)",
    ]
    draw.shuffle(writes)
    lines = (
        "kv = x0 * 1.5",
        f"c, k = {cut}",
        "normed = x1 * (c.float() * torch.rsqrt(c.float().pow(2).mean(-1, True) + 1e-6)).to(x0.dtype)",
        f"turned = {'k[:, None]' if miss == 'halves' else pairs}",
        "embedded = turned * x2 + torch.cat((-turned[..., 32:], turned[..., :32]), -1) * x3",
        "places = x6.argsort()[:3]",
        *writes,
        draw.choice(("torch.cat((keys[:, 0], latents), -1)", "keys[:, 0].sum(-1) + latents.sum(-1)")),
    )
    shapes = ((1, 3, 576), (512,), (1, 1, 3, 64), (1, 1, 3, 64), (1, 1, 7, 64), (1, 7, 512), (7,))
    return Spelling("lift_norm_rope_cache", lines, shapes, miss, alone=True)


def _rms_norm_of_a_sum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-2))
    miss = draw.choice(("alpha", "operand")) if wrong else ""
    total = {"alpha": "torch.add(x0, x1, alpha=2)", "operand": "x0 + x1[:1]"}.get(
        miss, draw.choice(("x0 + x1", "x1 + x0"))
    )
    lines = (
        f"total = {total}",
        f"root = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + {epsilon})",
        "normed = x2 * (total.float() * root).to(x0.dtype)",
        draw.choice(("normed + total", "normed - 2 * total")),
    )
    return Spelling("lift_add_rms_norm", lines, ((rows, 3, width), (rows, 3, width), (width,)), miss)


def _sum_and_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    return (_norm_of_a_sum if draw.random() < 1 / 3 else _rms_norm_of_a_sum)(draw, rows, wrong)


def _grouped_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Keys and values that several heads of queries share, repeated for these; the result lies as the heads do."""
    miss = draw.choice(("order", "keys")) if wrong else ""
    repeats = (
        "{}.repeat_interleave(2, 1)",
        "{}[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x0.shape[0], 4, 5, 16)",
    )
    repeat = "{}.repeat(1, 2, 1, 1)" if miss == "order" else draw.choice(repeats)
    lines = (
        f"k = {repeat.format('x1')}",
        f"v = {'x2.repeat(1, 2, 1, 1)' if miss == 'keys' else repeat.format('x2')}",
        "torch.nn.functional.scaled_dot_product_attention(x0, k, v, attn_mask=x3 > 0)",
    )
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 4, 5, 16), (rows, 2, 5, 16), (rows, 2, 5, 16), (rows, 1, 5, 5))
    return Spelling("lift_shared_heads", lines, shapes, miss, alone=True)


def _scaled_weight(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A product with a weight of whole numbers that is scaled before it."""
    columns, width = draw.choice((8, 24)), draw.choice((16, 32))
    miss = draw.choice(("twice", "shifted")) if wrong else ""
    scaled = draw.choice(("w.to(x0.dtype) * x2[:, None]", "x2.unsqueeze(1) * w.to(x0.dtype)"))
    scaled = {"twice": f"{scaled} * x3[:, None]", "shifted": f"({scaled}) + x3[:, None]"}.get(miss, scaled)
    lines = (
        "w = (x1 * 40).round().clamp(-127, 127).to(torch.int8)",
        f"weight = {scaled}",
        f"torch.nn.functional.linear(x0, weight{draw.choice(('', ', x3'))})",
    )
    return Spelling(
        "lift_weight_quant", lines, ((rows, width), (columns, width), (columns,), (columns,)), miss, alone=True
    )


def _twice(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    function = draw.choice(("torch.sin({})", "{} * x1", "torch.exp({})"))
    other = "x0[:1]" if wrong else "x0"
    ends = ("first * second", "torch.cat((first, second))", "first + 2 * second")
    lines = (f"first = {function.format('x0')}", f"second = {function.format(other)}", draw.choice(ends))
    return Spelling("lift_repeated", lines, ((rows, 8), (8,)), "operand" if wrong else "", alone=True)


MAKERS: dict[str, Callable[[random.Random, int | str, bool], Spelling]] = {
    "lift_rms_norm": _norm, "lift_add_rms_norm": _rms_norm_of_a_sum, "lift_add_layer_norm": _norm_of_a_sum,
    "lift_rotary": _rotary, "lift_attention": _biased_attention, "lift_shared_heads": _grouped_attention,
    "lift_activation": _activation, "lift_swiglu": _gated, "lift_gating": _router, "lift_sigmoid_gating": _sigmoid_router,
    "lift_group_norm_silu": _group_norm, "lift_cross_entropy": _loss, "lift_dynamic_quant": _quantised,
    "lift_quant_matmul": _product_of_whole_numbers, "lift_weight_quant": _scaled_weight,
    "lift_norm_rope_cache": _latent_writes, "lift_paged_cache": _cache_writes, "lift_bias": _biased,
    "lift_constants": _mask, "lift_repeated": _twice,
}  # fmt: skip
"""By form: what draws a spelling of it."""

_FORMS = (
    _norm,
    _rotary,
    _activation,
    _gated,
    _sum_and_norm,
    _biased_attention,
    _router,
    _sigmoid_router,
    _group_norm,
    _mask,
    _loss,
    _quantised,
    _product,
    _cache_writes,
    _latent_writes,
)


def drawn(seed: int, name: str = "") -> tuple[Case, Spelling]:
    """The case of a seed, and its spelling; of one form, where ``name`` is given."""
    draw = random.Random(f"{name}:{seed}" if name else seed)
    dynamic, write = draw.random() < 0.25, draw.random() < 0.25
    lift = draw.choice(("judged", "judged", "exact"))
    some = MAKERS[name] if name else _norm
    form = some if name or (lift == "exact" and draw.random() < 1 / 2) else draw.choice(_FORMS)
    nearly = lift == "exact" and form is _norm
    rows = _MANY_ROWS if nearly else _ROWS
    spelling = form(draw, "s0" if dynamic else rows, draw.random() < 1 / 3)
    lines = [*spelling.lines[:-1], f"result = {spelling.lines[-1]}"]
    if write:
        lines.insert(draw.randint(1, len(lines)), "x0.mul_(0.5)")
    dtype = draw.choice(_DTYPES[:1] if nearly else _DTYPES[:2] if spelling.form in _OF_16_BITS else _DTYPES)
    inputs = tuple(
        Input(shape, dtype, scale=draw.choice((1.0, 1.0, 0.01)), seed=seed + position)
        for position, shape in enumerate(spelling.shapes)
    )
    names = ", ".join(f"x{position}" for position in range(len(inputs)))
    # What is computed on the way may have another user.
    on_the_way = [line.split(" = ")[0] for line in spelling.lines[:-1] if "torch.topk" not in line]  # of equals any
    also = draw.choice(on_the_way) if on_the_way and not spelling.alone and draw.random() < 0.3 else ""
    source = "\n    ".join([f"def program({names}):", *lines, f"return (result,{also})"]) + "\n"
    sizes = ({"s0": rows}, {"s0": rows}, {"s0": rows + 2}) if dynamic else ({}, {}, {})
    case = Case(source, inputs, sizes=sizes, dynamic=dynamic, functional=not write, options={"lift": lift})
    return case, spelling


def spelling_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    judging.forget()  # a ruling that is kept may be a mutant's
    case, spelling = drawn(seed)
    return fault_of(case, spelling, check(case))


def fault_of(case: Case, spelling: Spelling, outcome: Outcome) -> str:
    """What is wrong with what came of an example; empty when nothing is."""
    if outcome.failures:
        return outcome.failures[0]
    if case.options["lift"] == "exact" and outcome.worst_ulp + outcome.eager_ulp:
        return f"bits differ from eager mode, by {outcome.worst_ulp} and {outcome.eager_ulp} ulp:\n{case.source}"
    lifted = outcome.report is not None and outcome.report.fusions(spelling.form) > 0
    if spelling.near_miss:
        return f"lifted, although the {spelling.near_miss} is wrong:\n{case.source}" if lifted else ""
    # A write in between may be a reason; which reasons there are is for the tests of each form.
    if (
        not lifted
        and case.functional
        and not any(said in reason for reason in outcome.near_misses for said in _REFUSED)
    ):
        return f"missed: {'; '.join(outcome.near_misses) or 'nothing resembled the form'}:\n{case.source}"
    return ""
