"""Examples for lifting: a norm, a rotary embedding, an activation or a gated product, spelled at random in ATen operators.

Each part of a spelling is drawn from the ways in which programs write it. One example in three is a near-miss: one part is
wrong in a way that changes what is computed. A spelling must be lifted, or be refused because the operator is farther from
float64; a near-miss must not be lifted. Either way the program computes what it did, in eager mode and by the oracle's judge.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case, check

_REFUSED = "farther from float64"
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Spelling:
    """A drawn program.

    Attributes:
        form: of lifting, which it spells.
        lines: of its body; the last one is the result.
        shapes: of its inputs x0, x1, ...
        near_miss: the part that is wrong; empty for a spelling.
    """

    form: str
    lines: tuple[str, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    near_miss: str = ""


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


_FORMS = (_norm, _rotary, _activation, _gated)


def drawn(seed: int) -> tuple[Case, Spelling]:
    """The case of a seed, and its spelling."""
    draw = random.Random(seed)
    dynamic, write = draw.random() < 0.25, draw.random() < 0.25
    spelling = draw.choice(_FORMS)(draw, "s0" if dynamic else 4, draw.random() < 1 / 3)
    lines = [*spelling.lines[:-1], f"result = {spelling.lines[-1]}"]
    if write:
        lines.insert(draw.randint(1, len(lines)), "x0.mul_(0.5)")
    dtype = draw.choice(_DTYPES)
    inputs = tuple(
        Input(shape, dtype, scale=draw.choice((1.0, 1.0, 0.01)), seed=seed + position)
        for position, shape in enumerate(spelling.shapes)
    )
    names = ", ".join(f"x{position}" for position in range(len(inputs)))
    # What is computed on the way may have another user.
    also = f"{lines[0].split(' = ')[0]}" if len(lines) > 1 and draw.random() < 0.2 else ""
    source = "\n    ".join([f"def program({names}):", *lines, f"return (result,{also})"]) + "\n"
    sizes = ({"s0": 4}, {"s0": 4}, {"s0": 6}) if dynamic else ({}, {}, {})
    case = Case(source, inputs, sizes=sizes, dynamic=dynamic, functional=not write, options={"lift": "judged"})
    return case, spelling


def spelling_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    case, spelling = drawn(seed)
    outcome = check(case)
    if outcome.failures:
        return outcome.failures[0]
    lifted = outcome.report is not None and outcome.report.fusions(spelling.form) > 0
    if spelling.near_miss:
        return f"lifted, although the {spelling.near_miss} is wrong:\n{case.source}" if lifted else ""
    # A write in between may be a reason; which reasons there are is for the tests of each form.
    if not lifted and case.functional and not any(_REFUSED in reason for reason in outcome.near_misses):
        return f"missed: {'; '.join(outcome.near_misses) or 'nothing resembled the form'}:\n{case.source}"
    return ""
