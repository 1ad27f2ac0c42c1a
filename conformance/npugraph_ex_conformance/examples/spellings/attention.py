"""Rotary embeddings, and attention: spelled out, with shared heads, and between two layouts."""

from __future__ import annotations

import random

from npugraph_ex_conformance.examples.spellings.spelling import ROWS, Spelling, plus_times


def rotary(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Halves or pairs of each head, turned by cosines and sines."""
    if wrong and draw.random() < 1 / 8:
        return _turned_by_matrices(draw, rows)
    return (_parted_rotary if draw.random() < 1 / 2 else _turned_rotary)(draw, rows, wrong)


def _turned_by_matrices(draw: random.Random, rows: int | str) -> Spelling:
    """Each pair is multiplied by a matrix of two rows and two columns, as Flux has it."""
    width = draw.choice((8, 16))
    parts = [f"matrices[..., {at}] * pairs[..., {at}]" for at in (0, 1)]
    draw.shuffle(parts)
    lines = (
        f"matrices = torch.stack((x1, -x2, x2, x1), -1).float().view(-1, 3, 1, {width // 2}, 2, 2)",
        f"pairs = x0.float().reshape(-1, 3, 2, {width // 2}, 1, 2)",
        f"({' + '.join(parts)}).reshape(x0.shape).to(x0.dtype)",
    )
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 3, 2, width), (1, 3, width // 2), (1, 3, width // 2))
    return Spelling("lift_rotary", lines, shapes, "matrices", told=True)


def _table(draw: random.Random, name: str, half: int, *, pairs: bool) -> tuple[str, str, int]:
    """What two parts are multiplied by, and how wide the table is: half, or whole, of which one part is used or both are."""
    cuts = ("[..., ::2]", "[..., 1::2]") if pairs else (f"[..., :{half}]", f"[..., {half}:]")
    first, second = (f"{name}{cut}" for cut in cuts)
    return draw.choice(((name, name, half), (first, first, 2 * half), (first, second, 2 * half)))


def _parted_rotary(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Part by part, with tables of half the width, or with parts of whole ones."""
    width = draw.choice((8, 16))
    half = width // 2
    miss = draw.choice(("sign", "order", "sine", "sine", "source", "join")) if wrong else ""
    pairs = draw.random() < 1 / 2
    cuts = ("(x[..., ::2], x[..., 1::2])", f"x.unflatten(-1, ({half}, 2)).unbind(-1)")
    cut = draw.choice(cuts if pairs else ("x.chunk(2, dim=-1)", f"x.unflatten(-1, (2, {half})).unbind(-2)"))
    cast = draw.choice(("", ".float()"))
    minus, plus = ("+", "-") if miss == "sign" else ("-", "+")
    way = draw.getrandbits(32)  # both tables are of one kind
    read = draw.choice(("{}", "{}", "{}[:, places]", "{}.index_select(1, places)"))  # each time, where it is used
    (cos, cosine, wide), (sin, sine, _) = (
        _table(random.Random(way), read.format(name), half, pairs=pairs) for name in ("cos", "sin")
    )
    sine = cosine if miss == "sine" else sine
    crossed = ("(first + 1)" if miss == "source" else "first", sine)
    parts = [
        plus_times(draw, f"first * {cos}", "second", sin, minus),
        plus_times(draw, f"second * {cosine}", *crossed, plus),
    ]
    parts = parts[::-1] if miss == "order" else parts
    stacked = pairs != (miss == "join")
    joined = (
        f"torch.stack(({', '.join(parts)}), dim=-1).flatten(-2)"
        if stacked
        else f"torch.cat(({', '.join(parts)}), dim=-1)"
    )
    lines: tuple[str, ...] = (f"x, cos, sin = x0{cast}, x1{cast}, x2{cast}", f"first, second = {cut}")
    if draw.random() < 1 / 4:
        places = ("::2", "1::2") if stacked else (f":{half}", f"{half}:")
        lines += ("joined = torch.empty_like(x)",)
        lines += tuple(f"joined[..., {place}] = {part}" for place, part in zip(places, parts, strict=True))
        joined = "joined"
    lines = ("places = torch.arange(2, -1, -1, device=x0.device)", *lines, f"({joined}).to(x0.dtype)")
    tables: int | str = 1 if pairs else draw.choice((1, rows))  # as below
    return Spelling("lift_rotary", lines, ((rows, 3, 2, width), (tables, 3, 1, wide), (tables, 3, 1, wide)), miss)


def _turned_rotary(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """The whole of x, and x turned by a quarter."""
    width = draw.choice((8, 16))
    half = width // 2
    miss = draw.choice(("sign", "no sign", "flip", "order", "source", "pairs", "number")) if wrong else ""
    cut = draw.choice(("x.chunk(2, dim=-1)", f"x.split({half}, -1)", f"(x[..., :{half}], x[..., {half}:])"))
    second = draw.choice(("-second", "second * -1", "second.neg()"))
    joined = {
        "sign": "torch.cat((second, -first), dim=-1)",
        "no sign": draw.choice(("torch.cat((second, first), dim=-1)", f"torch.roll(x, {half}, -1)")),
        "order": "torch.cat((-first, second), dim=-1)",
        "source": f"torch.cat(({second}, (first + 1)), dim=-1)",
        "pairs": "torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)",
        "flip": draw.choice(
            (
                f"(x.unflatten(-1, (2, {half})).flip(-2) * signs.view(2, {half})).flatten(-2)",
                f"torch.roll(x, {half}, -1) * signs",
                f"(x.view(*x.shape[:-1], {half}, 2).flip(-1) * signs[{half - 1}:{half + 1}]).flatten(-2)",
            )
        ),
    }.get(miss, f"torch.cat(({second}, first), dim=-1)")
    tables: int | str = rows
    if not miss and draw.random() < 0.3:
        tables = 1  # pairs are turned by tables along one dimension
        even, odd = draw.choice(
            (("x[..., ::2]", "x[..., 1::2]"), [f"x.unflatten(-1, ({half}, 2)).unbind(-1)[{at}]" for at in (0, 1)])
        )
        joined = f"torch.stack((-{odd}, {even}), dim=-1).flatten(-2)"
    elif not miss and draw.random() < 0.3:
        joined = f"torch.stack(({second}, first), dim=-2).flatten(-2)"
    cast = draw.choice(("", ".float()"))
    sign = draw.choice("++-")  # turned the other way round, it is subtracted
    turned = joined if sign == "+" else f"-{joined}"
    if sign == "-" and joined == f"torch.cat(({second}, first), dim=-1)":
        turned = draw.choice((turned, "torch.cat((second, -first), dim=-1)"))
    sine = f"x2{cast}[0, 0, 0, 0]" if miss == "number" else f"x2{cast}"
    total = plus_times(draw, f"x * x1{cast}", "turned", sine, sign)
    signs = f"signs = 1.0 - 2.0 * (torch.arange({width}, device=x0.device) < {half}).to(x.dtype)"
    lines: tuple[str, ...] = (f"x = x0{cast}", signs, f"first, second = {cut}", f"turned = {turned}")
    lines += (f"({total}).to(x0.dtype)",)
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 3, 2, width), (tables, 3, 1, width), (tables, 3, 1, width))
    return Spelling("lift_rotary", lines, shapes, miss, told=miss in {"no sign", "flip"})


def attended(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A softmax that is safe, or a plain one in rows that have a key, as the options declare."""
    way = draw.random()
    spelled = _attention_by_einsum if way < 1 / 8 else _attention_by_baddbmm if way < 1 / 4 else _declared_attention
    return (spelled if way < 1 / 2 else _biased_attention)(draw, rows, wrong)


def _attention_by_einsum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Heads stand before or behind positions in each operand, and the operands in either order."""
    heads, width, keys = draw.choice((2, 3)), draw.choice((4, 16)), draw.choice((3, 5))
    miss = draw.choice(("heads", "turned", "shift", "weights")) if wrong else ""
    firsts = [draw.random() < 1 / 2 for _ in range(3)]
    q, k, v = (f"bh{axis}d" if first else f"b{axis}hd" for axis, first in zip("qkk", firsts, strict=True))
    scores = "bqk" if miss == "heads" else "bhqk"
    pairs = [
        [(q, "x0"), (k, "x1")],
        [(v, "x2"), (scores.replace("qk", "kq") if miss == "turned" else scores, "weights")],
    ]
    for pair in pairs:
        draw.shuffle(pair)
    first, second = (
        f'torch.einsum("{one},{other}->{result}", {left}, {right})'
        for ((one, left), (other, right)), result in zip(pairs, (scores, draw.choice(("bqhd", "bhqd"))), strict=True)
    )
    lines = (
        f"scores = {first} * {draw.choice((1.0, 0.25, 0.3))}",
        f"weights = torch.softmax({_shifted(draw, wrong=miss == 'shift')}, -1){_behind(draw, wrong=miss == 'weights')}",
        f"{second}.flatten(1)",
    )
    queries = keys if miss == "turned" else draw.choice((1, 3))
    sizes = zip((queries, keys, keys), firsts, strict=True)
    shapes = tuple((rows, heads, size, width) if first else (rows, size, heads, width) for size, first in sizes)
    return Spelling("lift_attention", lines, shapes, miss, alone=True, declared=True, told=miss == "weights")


def _behind(draw: random.Random, *, wrong: bool) -> str:
    """What the weights are multiplied by behind the softmax: nothing, or a number or a tensor, which is wrong."""
    return draw.choice((" * 0.5", " / 0.9", " * (x0[:1, :1, :1, :1] > 0)")) if wrong else ""


def _shifted(draw: random.Random, *, wrong: bool) -> str:
    """Scores, or what is left of them without the largest one of each row."""
    largest = ("scores.amax(-1, keepdim=True)", "scores.max(-1, keepdim=True)[0]")
    others = ("scores.amax(-2, keepdim=True)", "scores.amin(-1, keepdim=True)")
    taken = draw.choice(others if wrong else ("", *largest))
    return f"scores - {taken}" if taken else "scores"


def _attention_by_baddbmm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Batches and heads are one dimension, and a bias is added with the product, or nothing."""
    width, keys = draw.choice((4, 16)), draw.choice((3, 5))
    miss = draw.choice(("beta", "factor", "bias", "shift", "shift")) if wrong else ""
    beta = 0.5 if miss == "beta" else 1.0 if miss else draw.choice((0, 1.0))
    alpha = draw.choice((1.0, 0.25, 0.3))
    bias = draw.choice(("x3", "x3[:, :1]", "x3[:1]")) if miss != "bias" else "x3.mT"
    shown = draw.choice(("", f"beta={beta}, ")) if beta == 1.0 else f"beta={beta}, "
    product = f"torch.baddbmm({bias}, x0, x1.mT, {shown}alpha={alpha})"
    if miss == "bias":
        product = f"torch.baddbmm(x3.mT, x1, x0.mT, alpha={alpha}).mT"
    shifted, cast = _shifted(draw, wrong=miss == "shift"), draw.choice(("", ", dtype=torch.float32"))
    lines = (
        f"scores = {product}{' * 0.5' if miss == 'factor' else ''}",
        f"weights = torch.softmax({shifted}, -1{cast}).to(x0.dtype)",
        "torch.bmm(weights, x2)",
    )
    shapes: tuple[tuple[int | str, ...], ...] = (
        (rows, 3, width),
        (rows, keys, width),
        (rows, keys, width),
        (rows, 3, keys),
    )
    shapes = tuple((6, *shape[1:]) for shape in shapes)  # heads are known
    return Spelling("lift_attention", lines, shapes, miss, alone=True, declared=True)


def _declared_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A plain softmax over scores, some of which a mask fills; the first key of each row stays."""
    heads, width, keys = draw.choice((1, 2)), draw.choice((4, 16)), draw.choice((3, 5))
    scale = draw.choice((1.0, 0.25, 0.3))
    miss = draw.choice(("over", "fill", "twice", "weights", "sink")) if wrong else ""
    first = "x3[:1]" if isinstance(rows, int) else "x3"  # it is repeated for known sequences
    of = draw.choice(("x3", "x3[:, :1]", first, "x3[:, :1, :1]", "x3[0, 0]"))
    scores = draw.choice((f"(x0 * {scale}) @ x1.mT", f"x0 @ x1.transpose(-1, -2) * {scale}"))
    scores = f"({scores} + x3)" if draw.random() < 1 / 4 else f"({scores})"
    low = draw.choice(('float("-inf")', "torch.finfo(x0.dtype).min", "-1e4"))
    low = "0.0" if miss == "fill" else low
    ways = (
        f"{scores}.masked_fill(hidden, {low})", f"torch.where(hidden, {low}, {scores})",
        f"torch.where(~hidden, {scores}, {low})", *((scores,) if miss != "fill" else ()),
    )  # fmt: skip
    filled = draw.choice(ways)
    cast = draw.choice(("", ", dtype=torch.float32"))
    over = -2 if miss == "over" else -1
    softmax = f"torch.softmax({filled}, {over}{cast})"
    sink = f"torch.softmax(torch.cat(({filled}, x3[..., :1] * 2), -1), -1{cast})[..., :-1]"
    weights = {"twice": f"torch.softmax({softmax}, -1)", "sink": sink}.get(miss, softmax)
    lines = (
        f"hidden = ({of} > 0) & (torch.arange({keys}, device=x3.device) > 0)",
        f"weights = {weights}.to(x0.dtype){_behind(draw, wrong=miss == 'weights')}",
        draw.choice(("weights @ x2", f"(weights @ x2).transpose(1, 2).reshape(x0.shape[0], -1, {heads * width})")),
    )
    queries = 3 if miss == "over" else draw.choice((1, 3))
    shapes: tuple[tuple[int | str, ...], ...] = (
        (rows, heads, queries, width), (rows, heads, keys, width), (rows, heads, keys, width), (rows, heads, queries, keys),
    )  # fmt: skip
    return Spelling("lift_attention", lines, shapes, miss, alone=True, declared=True, told=miss in {"weights", "sink"})


def _biased_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A softmax over scores with a bias, spelled out or by torch."""
    heads, width, keys = draw.choice((1, 2)), draw.choice((4, 16)), draw.choice((3, 5))
    miss = draw.choice(("softmax", "over", "keys")) if wrong else ""
    scale = draw.choice((1.0, 0.25, 0.3))
    nothing = f"torch.zeros(3, {keys}, dtype=x3.dtype, device=x3.device)"
    bias, one_head = draw.choice(
        (
            *(("x3", ""), ("x3[:, :1]", ""), ("x3[:1]", ""), ("x3[:, :1, :1]", ""), ("x3[0, 0]", "")),
            *((nothing, ""), ("x3", "[:, :1]")),
        )
    )
    k, v = f"x1{one_head}", f"x2{one_head}"
    attended = f"torch.nn.functional.scaled_dot_product_attention(x0, {k}, {v}, attn_mask={bias}, scale={scale})"
    if wrong or draw.random() < 0.5:
        right = "x1[:, :, ::2].repeat(1, 1, 2, 1)[:, :, :KEYS]" if miss == "keys" else k
        right = right.replace("KEYS", str(keys))
        scores = draw.choice((f"(x0 * {scale}) @ {right}.mT", f"x0 @ {right}.transpose(-1, -2) * {scale}"))
        over = -2 if miss == "over" else -1
        softmax = "torch.softmax" if miss in {"softmax", "keys"} else "torch.ops.aten._safe_softmax"
        attended = f"{softmax}(({scores}) + {bias}, {over}) @ {v}"
    shapes: tuple[tuple[int | str, ...], ...] = (
        (rows, heads, 3, width), (rows, heads, keys, width), (rows, heads, keys, width), (rows, heads, 3, keys),
    )  # fmt: skip
    return Spelling("lift_attention", (f"attended = {attended}", "attended"), shapes, miss)


def grouped_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Keys and values that several heads of queries share, repeated for these; the result lies as the heads do."""
    miss = draw.choice(("order", "keys")) if wrong else ""
    repeats = (
        "{}.repeat_interleave(2, 1)",
        "{}[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x0.shape[0], 4, 5, 16)",
        "{}[:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2)",
    )
    # While positions stand before heads.
    behind = (
        "{}.transpose(1, 2).repeat_interleave(2, -2).transpose(1, 2)",
        "{}.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3).permute(0, 2, 1, 3)",
    )
    repeat = "{}.repeat(1, 2, 1, 1)" if miss == "order" else draw.choice((*repeats, *behind))
    lines = (
        f"k = {repeat.format('x1')}",
        f"v = {'x2.repeat(1, 2, 1, 1)' if miss == 'keys' else repeat.format('x2')}",
        "torch.nn.functional.scaled_dot_product_attention(x0, k, v, attn_mask=x3 > 0)",
    )
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 4, 5, 16), (rows, 2, 5, 16), (rows, 2, 5, 16), (rows, 1, 5, 5))
    return Spelling("lift_shared_heads", lines, shapes, miss, alone=True)


def turned_attention(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Queries, keys and values lie position by position, and so does the result, as one product gives and the next takes them."""
    miss = draw.choice(("memory", "order")) if wrong else ""
    cuts = (
        "x0.permute(2, 0, 3, 1, 4).unbind(0)",
        "(one.transpose(1, 2) for one in x0.unbind(2))",
        "(x0[:, :, at].permute(0, 2, 1, 3) for at in range(3))",
    )
    order = "permute(0, 2, 3, 1)" if miss == "order" else draw.choice(("transpose(1, 2)", "permute(0, 2, 1, 3)"))
    end = draw.choice(("flatten(2)", "reshape(x0.shape[0], 5, 32)", "contiguous()"))
    end = "flatten(2)" if miss == "order" else end
    lines = (
        f"q, k, v = {draw.choice(cuts)}",
        f"keys = {'k.contiguous() + 1' if miss == 'memory' else draw.choice(('k', 'k.contiguous()'))}",
        "attended = torch.nn.functional.scaled_dot_product_attention(q, keys, v, attn_mask=x1 > 0)",
        f"attended.{order}.{end}",
    )
    return Spelling("lift_attention_layout", lines, ((ROWS, 5, 3, 2, 16), (ROWS, 1, 5, 5)), miss, alone=True)
