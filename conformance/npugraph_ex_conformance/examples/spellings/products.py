"""Products, of whole numbers too, and what is quantised for them."""

from __future__ import annotations

import random

from npugraph_ex_conformance.examples.spellings.spelling import Spelling, times


def quantised(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Dynamic quantisation. The result does not jump where a quotient lies between two whole numbers: either is right there."""
    width = draw.choice((16, 24))
    miss = draw.choice(("dimension", "floor", "source", "clamp")) if wrong else ""
    wide = draw.choice(("x0.float()", "x0"))
    of, dim = ("(wide + 1)" if miss == "source" else "wide"), (1 if miss == "dimension" else -1)
    norm = f"torch.linalg.vector_norm({of}, float('inf'), {dim}, keepdim=True)"
    ends = f"(lambda ends: torch.maximum(-ends[0], ends[1]))(torch.aminmax({of}, dim={dim}, keepdim=True))"
    low_end, high_end = (f"{of}.{name}({dim}, keepdim=True)[0]" for name in ("min", "max"))
    by_both = f"torch.maximum({draw.choice((f'{low_end}.abs(), {high_end}.abs()', f'-{low_end}, {high_end}'))})"
    alone = draw.choice((by_both, ends))
    largest = draw.choice(
        (alone, f"{of}.abs().amax({dim}, keepdim=True)", f"{of}.abs().max({dim}, keepdim=True)[0]", norm)
    )
    most = draw.choice((127, 127, 127, 127.5, 120))
    scales = [
        f"largest.float() / {most}",
        f"largest.float() * (1 / {most})",
        f"(largest.float() / {most}).clamp(min=1e-5)",
        f"largest.float().clamp(min=1e-5) / {most}",
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
    return Spelling("lift_dynamic_quant", lines, ((rows, 3, width),), miss, alone=largest == norm)


def product_of_whole_numbers(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Which whole numbers they are is seen from comparisons, which are exact."""
    columns, width = draw.choice((8, 24)), draw.choice((16, 32))
    miss = draw.choice(("wraps", "token", "number")) if wrong else ""
    cast = "" if miss == "wraps" else draw.choice((".float()", ".to(torch.int32)", ".half()", ".double()"))
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


def biased(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A product and a bias."""
    width, columns = draw.choice((8, 16)), draw.choice((4, 6))
    miss = draw.choice(("alpha", "rows", "batches")) if wrong else ""
    turned = miss == "batches" or draw.random() < 0.5
    products = ["x0 @ {}", "torch.matmul(x0, {})", "torch.tensordot(x0, {}, dims=1)"]
    names = "kd" if turned else "dk"
    products += [f"torch.einsum('...d,{names}->...k', x0, x1)", f"torch.einsum('{names},...d->...k', x1, x0)"]
    lead: tuple[int | str, ...] = (rows, 3) if miss == "batches" else draw.choice(((rows,), (rows, 3)))
    if len(lead) > 1:  # one weight for all matrices of a batch, as a view or copied
        many = ("{}.expand(x0.shape[0], -1, -1)", "{}[None].repeat(x0.shape[0], 1, 1)")
        products += [f"torch.bmm(x0, {draw.choice(many)})"]
    if miss == "batches":  # the weight comes first, and each batch is a product of its own
        products = ["torch.bmm(x1.expand(x0.shape[0], -1, -1), x0.mT).mT"]
    product = draw.choice(products).format("x1.t()" if turned else "x1")
    bias = "x2[:1]" if miss == "rows" else "x2"
    ends = (f"{product} + {bias}", f"{bias} + {product}", f"torch.add({bias}, {product})")
    end = f"torch.add({product}, x2, alpha=2)" if miss == "alpha" else draw.choice(ends)
    weight = (columns, width) if turned else (width, columns)
    return Spelling("lift_bias", (f"({end}).to(x0.dtype)",), ((*lead, width), weight, (columns,)), miss)


def activated(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """ReLU of a product, or GELU of one without a bias, on a device that computes both at once."""
    width, columns = draw.choice((8, 16)), draw.choice((4, 6))
    miss = draw.choice(("scale", "matrix", "bias of GELU")) if wrong else ""
    lead: tuple[int | str, ...] = (rows,) if miss else draw.choice(((rows,), (rows, 3)))
    library = "torch.nn.functional"
    bare = draw.choice(("x0 @ x1.t()", f"{library}.linear(x0, x1)"))
    einsum = "torch.einsum('...d,kd->...k', x0, x1)"
    linear = f"{library}.linear(x0, x1, x2)"
    # The suite traces a linear function of three dimensions for one size alone.
    biased = draw.choice((linear if len(lead) == 1 else f"{bare} + x2", f"{bare} + x2", f"{einsum} + x2"))
    rectified = draw.choice(("torch.relu(product)", f"{library}.relu(product)"))
    curved = draw.choice((f"{library}.gelu(product)", f"{library}.gelu(product, approximate='tanh')"))
    product, result = draw.choice(((bare, rectified), (biased, rectified), (bare, curved)))
    if miss:
        product, result = {
            "scale": ("torch.addmm(x2, x0, x1.t(), alpha=0.5)", rectified),
            "matrix": ("torch.addmm(x3, x0, x1.t())", rectified),
            "bias of GELU": (linear, curved),
        }[miss]
    shapes = ((*lead, width), (columns, width), (columns,), (rows, columns))
    return Spelling(
        "lift_product_activation", (f"product = {product}", result), shapes, miss, alone=True, told=bool(miss),
        device="Ascend950PR_9579",
    )  # fmt: skip


def scaled_weight(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A product with a weight of whole numbers that is scaled before it; behind it, it is another one where a scale is infinite."""
    columns, width = draw.choice((8, 24)), draw.choice((16, 32))
    miss = draw.choice(("twice", "shifted", "dimension", "behind", "zero", "groups")) if wrong else ""
    scaled = draw.choice(("w.to(x0.dtype) * x2[:, None]", "x2.unsqueeze(1) * w.to(x0.dtype)"))
    scaled = "w.to(x0.dtype) * x2" if miss == "dimension" else scaled
    others = {
        "twice": f"{scaled} * x3[:, None]", "shifted": f"({scaled}) + x3[:, None]", "zero": "(w.to(x0.dtype) - 3) * x2[:, None]",
        "groups": "(w.to(x0.dtype).unflatten(-1, (4, -1)) * x2.view(-1, 1, 1)).flatten(1)",
    }  # fmt: skip
    scaled = others.get(miss, scaled)
    scales = width if miss == "dimension" else columns
    lines: tuple[str, ...] = (
        "w = (x1 * 40).round().clamp(-127, 127).to(torch.int8)",
        f"weight = {scaled}",
        f"torch.nn.functional.linear(x0, weight{draw.choice(('', ', x3'))})",
    )
    if miss == "behind":
        inside, added = draw.choice((("", ""), ("", " + x3"), (", x3", "")))
        product = times(draw, f"torch.nn.functional.linear(x0, w.to(x0.dtype){inside})", "x2")
        lines = (lines[0], f"{product}{added}")
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, width), (columns, width), (scales,), (columns,))
    return Spelling("lift_weight_quant", lines, shapes, miss, alone=True, told=bool(miss) and miss != "shifted")
