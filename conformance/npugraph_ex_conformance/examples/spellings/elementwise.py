"""Activations, operators in float32, masks, and what a program computes twice."""

from __future__ import annotations

import random

from npugraph_ex_conformance.examples.spellings.spelling import Spelling, product_of


def activation(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """GELU by its formula with an error function, a tanh, or by a sigmoid."""
    miss = "constant" if wrong else ""
    slope, cubic, root = ("1.71", "0.0449", "1.4145") if wrong else ("1.702", "0.044715", "2**0.5")
    x3 = draw.choice(("torch.pow(x0, 3.0)", "x0 * x0 * x0", "x0 ** 3"))
    inner = draw.choice((f"0.7978845608 * (x0 + {cubic} * ({x3}))", f"x0 * 0.79788456 * (1 + {cubic} * x0 * x0)"))
    tanh = draw.choice((f"(1.0 + torch.tanh({inner}))", f"(torch.tanh({inner}) + 1)"))
    erf = draw.choice((f"(1.0 + torch.erf(x0 / {root}))", f"(torch.erf(x0 * (1 / {root})) + 1)"))
    erf = draw.choice((erf, erf, f"torch.erfc(-x0 / {root})"))
    ends = (
        draw.choice((f"0.5 * x0 * {erf}", f"x0 * (0.5 * {erf})", f"x0 * {erf} / 2")),
        draw.choice((f"0.5 * x0 * {tanh}", f"x0 * (0.5 * {tanh})", f"x0 * {tanh} / 2")),
        draw.choice(
            (
                f"x0 * torch.sigmoid({slope} * x0)",
                f"torch.sigmoid(x0 * {slope}) * x0",
                f"x0 / (1 + torch.exp(-{slope} * x0))",
            )
        ),
    )
    if not miss and draw.random() < 1 / 4:  # of one factor
        product = product_of(draw, ("x0", draw.choice(("torch.sigmoid(1.702 * x0)", "torch.sigmoid(x0)")), "x1"))
        return Spelling("lift_activation", (product,), ((rows, 24), (rows, 24)))
    return Spelling("lift_activation", (draw.choice(ends),), ((rows, 24),), miss, told=wrong)


def scaled_sum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A tensor times a number that every dtype has, plus or minus a tensor; what is wrong is what is scaled, or the sign."""
    miss = draw.choice(("number", "sign")) if wrong else ""
    number = draw.choice(("0.5", "-1.5", "0.1875"))
    factor = "x0[0, 0]" if miss == "number" else number
    scaled = draw.choice((f"x0 * {factor}", f"{factor} * x0"))
    sums = (f"{scaled} - x1",) if miss == "sign" else (f"{scaled} + x1", f"x1 + {scaled}", f"x1 - {scaled}")
    return Spelling("lift_scaled_sum", (draw.choice(sums),), ((rows, 24), (rows, 24)), miss, alone=True)


def softmax(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """By exponentials, or by its logarithm."""
    dim, other = draw.choice(((-1, 1), (2, 1), (1, 2)))
    miss = draw.choice(("largest", "sum", "exponent", "weights", "added")) if wrong else ""
    wide = f"wide = {draw.choice(('x0.float()', 'x0'))}"
    if not miss and draw.random() < 1 / 4:
        lines: tuple[str, ...] = (wide, f"logarithm = torch.log_softmax(wide, {dim})", "logarithm.exp().to(x0.dtype)")
        return Spelling("lift_softmax", lines, ((rows, 3, 24),), alone=True)
    of, over = (other if miss == name else dim for name in ("largest", "sum"))
    largest = draw.choice(
        (f"wide.amax({of}, keepdim=True)", f"wide.max({of}, keepdim=True)[0]", f"wide.amax({of}).unsqueeze({of})")
    )
    weights, added = "(weights + 1)" if miss == "weights" else "weights", " + 0.5" if miss == "added" else ""
    lines = (
        wide,
        "weights = torch.exp(wide)" if miss == "exponent" else f"weights = torch.exp(wide - {largest})",
        f"total = {draw.choice((f'weights.sum({over}, keepdim=True)', f'weights.sum({over}).unsqueeze({over})'))}{added}",
        f"({draw.choice((f'{weights} / total', f'{weights} * (1 / total)'))}).to(x0.dtype)",
    )
    return Spelling("lift_softmax", lines, ((rows, 3, 24),), miss, alone=True, told=bool(miss) and miss != "weights")


def gated(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """SwiGLU of the halves of one tensor."""
    miss = draw.choice(("gate", "halves")) if wrong else ""
    gate, up = ("second", "first") if miss == "gate" else ("first", "second")
    factors = draw.choice((
        [f"torch.nn.functional.silu({gate})"], [gate, f"torch.sigmoid({gate})"], [gate, f"(1 / (1 + torch.exp(-{gate})))"],
    ))  # fmt: skip
    return Spelling("lift_swiglu", _product_of_halves(draw, factors, up, miss), ((rows, 24),), miss)


def gelu_gated(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """GeGLU of the halves of one tensor, of which either is the gate."""
    miss = draw.choice(("source", "halves")) if wrong else ""
    gate, up = draw.choice((("first", "second"), ("second", "first")))
    of = "(first + second)" if miss == "source" else gate
    kinds = ("none", "tanh")
    factors = draw.choice((
        [f"torch.nn.functional.gelu({of}, approximate='{draw.choice(kinds)}')"],
        ["0.5", of, f"(1 + torch.erf({of} * 0.7071067811865476))"],
        ["0.5", of, f"(1 + torch.tanh(0.7978845608 * ({of} + 0.044715 * {of} ** 3)))"],
    ))  # fmt: skip
    return Spelling("lift_geglu", _product_of_halves(draw, factors, up, miss), ((rows, 24),), miss)


def _product_of_halves(draw: random.Random, factors: list[str], other: str, miss: str) -> tuple[str, ...]:
    """The product of the factors of an activation and of the other half, multiplied in any order."""
    cuts = ("x0.chunk(2, -1)", "x0[..., :12], x0[..., 12:]", "x0.unflatten(-1, (2, 12)).unbind(-2)")
    cut = "x0[..., 1:13], x0[..., 12:]" if miss == "halves" else draw.choice(cuts)
    product = product_of(draw, [*factors, other])
    if not miss and draw.random() < 1 / 4:  # rows of one dimension more or less behind the cut
        cut = f"(one{draw.choice(('[None]', '.unsqueeze(1)', '.view(1, -1, 12)'))} for one in ({cut}))"
    if draw.random() < 2 / 3:
        return f"first, second = {cut}", product
    wide = "first, second = first.float(), second.float()"
    return f"first, second = {cut}", wide, f"({product}).to(x0.dtype)"


def upcast(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """An operator in float32, cast back; what is wrong may be an operand that was never narrower, or another result of the norm."""
    width = 24
    miss = draw.choice(("weight", "operand", "result")) if wrong else ""
    wide = draw.choice(("x0.float()", "x0.to(torch.float32)"))
    wide = f"{wide} * 1.25" if miss == "operand" else wide
    weight = "x1.float() * 1.25" if miss == "weight" else draw.choice(("x1.float()", "x1.to(torch.float32)"))
    norm = f"torch.nn.functional.layer_norm(wide, ({width},), weight, x2.float(), {draw.choice((1e-6, 1e-5, 1e-2))})"
    groups = draw.choice((1, 2, 3))
    others = (
        f"torch.nn.functional.group_norm(wide, {groups}, x1[:6].float(), x2[:6].float(), 1e-6)",
        f"torch.nn.functional.layer_norm(wide, ({width},))",
        f"torch.softmax(wide, {draw.choice((-1, 1))})",
        f"torch.log_softmax(wide, {draw.choice((-1, 2))})",
        f"torch.nn.functional.gelu(wide, approximate='{draw.choice(('none', 'tanh'))}')",
        "torch.nn.functional.silu(wide)",
    )
    call = norm if miss == "weight" or draw.random() < 1 / 3 else draw.choice(others)
    if miss == "result":
        call = f"torch.native_layer_norm(wide, ({width},), weight, x2.float(), 1e-5)[1]"
    end = draw.choice(("result.to(x0.dtype)", "result.type_as(x0)"))
    lines = (f"wide = {wide}", f"weight = {weight}", f"result = {call}", end)
    return Spelling("lift_upcast", lines, ((rows, 6, width), (width,), (width,)), miss, alone=True)


def mask(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """What is wrong is a value of x0 in the mask, or a fraction that the dtype has not.

    The value is another one in each call; the numbers before it are still constant.
    """
    width = draw.choice((8, 16))
    if wrong and draw.random() < 1 / 2:
        fractions = f"torch.full(({width},), {draw.choice(('0.1', '1 / 3'))}, dtype=x0.dtype, device=x0.device)"
        return Spelling("lift_constants", (f"x0 * {fractions} + x1",), ((rows, width), (width,)), "fraction")
    start = "x0[0, 0].long()" if wrong else draw.choice(("0", "1"))
    compared = draw.choice(
        ("places[None] <= places[:, None]", "places[:, None] >= places", "(places - places[:, None]) < 1")
    )
    ends = (
        "torch.where(allowed, x0[:, None], x1).sum(1)",
        "(x0[:, None] * allowed).sum(1) + x1",
        "(x0[:, None] + x1).masked_fill(~allowed, 0).sum(1)",
        "(x0[:, None] + (1.0 - allowed.to(x0.dtype)) * -8.0).amax(1) + x1",
        "(x0[:, None] + (added := 1.0 - allowed.to(x0.dtype)).masked_fill(added.bool(), -8.0)).amax(1) + x1",
    )
    lines = (f"places = torch.arange({width}, device=x0.device) * {start}", f"allowed = {compared}", draw.choice(ends))
    return Spelling("lift_constants", lines, ((rows, width), (width,)))


def twice(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """One function of the same operand, two times; what is wrong may be a write of its memory in between."""
    miss = draw.choice(("operand", "write")) if wrong else ""
    function = draw.choice(("torch.sin({})", "{} * x1", "torch.exp({})"))
    other = "x0[:1]" if miss == "operand" else "x0"
    between = ("same = x0.view(-1)", "same.mul_(0.5)") if miss == "write" else ()
    ends = ("first * second", "torch.cat((first, second))", "first + 2 * second")
    lines = (f"first = {function.format('x0')}", *between, f"second = {function.format(other)}", draw.choice(ends))
    return Spelling("lift_repeated", lines, ((rows, 8), (8,)), miss, alone=True, writes=bool(between))
