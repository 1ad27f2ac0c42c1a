"""Norms, alone, of a sum, and before an activation."""

from __future__ import annotations

import random
import re

from npugraph_ex_conformance.examples.spellings.spelling import Spelling, plus_times, times


def norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """By squares, or by the length of each row."""
    return (_norm_by_length if draw.random() < 1 / 4 else _norm)(draw, rows, wrong)


def _norm_by_length(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """RMS norm by the length of a row. Only an epsilon under the root is the operator's; in front of a norm it may be missing."""
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-5, 1e-2))
    miss = draw.choice(("epsilon", "bound", "size", "square", "divisor")) if wrong else ""
    of = "(wide + 1)" if miss == "square" else "wide"
    length = draw.choice((f"{of}.norm(dim=-1, keepdim=True)", f"torch.linalg.vector_norm({of}, 2, -1, keepdim=True)"))
    size = width - 1 if miss == "size" else width
    mean = draw.choice((f"length ** 2 / {size}", f"length * length * (1 / {size})"))
    root = draw.choice((f"length * {size} ** -0.5", f"(length / {size} ** 0.5)"))
    mean = f"{mean} / x1[:1].exp()" if miss == "divisor" else mean
    divisors = {"epsilon": f"({root} + {epsilon})", "bound": f"({root}).clamp(min={epsilon})"}
    under = f"torch.sqrt({mean} + {epsilon})"
    divisor = divisors.get(miss) or draw.choice((under, f"({root})" if miss != "divisor" else under, under))
    end = draw.choice(("x1 * normed.to(x0.dtype)", "(normed * x1.float()).to(x0.dtype)"))
    lines = (f"wide = {draw.choice(('x0.float()', 'x0'))}", f"length = {length}", f"normed = wide / {divisor}", end)
    return Spelling("lift_rms_norm", lines, ((rows, 3, width), (width,)), miss, told=miss in divisors)


def _norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """RMS norm, with its weight as it is, in float32, or as a distance from one."""
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-5, 1e-2))
    misses = (
        "epsilon", "dimension", "dimension", "mean", "size", "square", "operand", "root", "weight", "weight", "numbers",
    )  # fmt: skip
    miss = draw.choice(misses) if wrong else ""
    wide = draw.choice(("x0.float()", "x0.to(torch.float32)", "x0"))
    of = "(wide + 1)" if miss == "square" else "wide"
    squares = (f"{of}.pow(2)", f"{of} * {of}", f"torch.square({of})", f"{of} ** 2", f"{of}.abs() * {of}.abs()")
    square = draw.choice(squares)
    dim = 0 if miss == "dimension" else -1
    divisor = {"mean": "1", "size": f"{width - 1}"}.get(miss, f"{width}")
    sums = [f"square.sum({dim}, keepdim=True)"] * 2
    if miss != "dimension":
        sums += [
            f"({of}.unsqueeze(-2) @ {of}.unsqueeze(-1)).squeeze(-1)",
            f"torch.linalg.vecdot({of}, {of})[..., None]",
        ]
        sums += [f"torch.einsum('...d,...d->...', {of}, {of}).unsqueeze(-1)", "square.cumsum(-1)[..., -1:]"]
        sums += ["square @ square.new_ones(square.shape[-1], 1)"]
    means = [f"{total} / {divisor}" for total in sums]
    if miss not in {"mean", "size", "dimension"}:
        pool, part = f"torch.nn.functional.avg_pool1d(square, {width})", f"square.new_full(({width}, 1), {1 / width})"
        means += [pool, f"square @ {part}"]
    if miss not in {"mean", "size"}:
        means += [f"square.mean({dim}, keepdim=True)", f"square.mean({dim}).unsqueeze({dim})"] * 2
    wrong_sums = {
        "operand": "torch.einsum('...d,...d->...', wide, wide + 1).unsqueeze(-1)",
        "numbers": f"square @ torch.arange({width}, dtype=square.dtype, device=square.device).unsqueeze(-1)",
    }
    mean = f"{wrong_sums[miss]} / {width}" if miss in wrong_sums else draw.choice(means)
    under = draw.choice((f"mean + {epsilon}", f"{epsilon} + mean"))
    roots = {
        "epsilon": (f"1 / (torch.sqrt(mean) + {epsilon})",),
        "root": (f"({under}).sqrt()", f"torch.exp(0.5 * torch.log({under}))", f"torch.exp2(-0.5 * torch.log({under}))"),
    }
    root = draw.choice(roots.get(miss) or _inverse_roots(under))
    if not miss and draw.random() < 1 / 4:  # a number for each row gets its dimension behind the root
        mean, root = f"square.mean({dim})", f"({root}){draw.choice(('[..., None]', '.view(*mean.shape, 1)'))}"
    normed = times(draw, "wide", "root")
    ends: tuple[str, ...] = (
        "x1 * normed.to(x0.dtype)",
        "(normed * (x1).float()).to(x0.dtype)",
        "(normed * (1.0 + x1)).to(x0.dtype)",
        *_COUNTED_FROM_ONE,
    )
    if miss == "weight":
        ends = ("(normed - normed * x1).to(x0.dtype)", "torch.add(normed, normed * x1, alpha=2).to(x0.dtype)")
    # Rows of a matrix, which go back to their places before they are cast.
    if miss != "dimension" and draw.random() < 1 / 4:
        wide = f"{wide}.view(-1, {width})"
        ends = tuple(re.sub(r"(normed|\(normed.*\))\.to", r"\1.view(x0.shape).to", end) for end in ends)
    lines = (
        f"wide = {wide}",
        f"square = {square}",
        f"mean = {mean}",
        f"root = {root}",
        f"normed = {normed}",
        draw.choice(ends),
    )
    told = miss in {"mean", "epsilon", "root"}
    from_one = miss == "weight" or (not miss and re.search(r"1.0 \+|normed \+|\+ normed", lines[-1]))
    by = "npu_gemma_rms_norm" if from_one else ""
    return Spelling("lift_rms_norm", lines, ((rows, 3, width), (width,)), miss, told=told, by=by)


_COUNTED_FROM_ONE = ("(normed + normed * x1).to(x0.dtype)", "(normed * x1 + normed).to(x0.dtype)")


def _inverse_roots(under: str) -> tuple[str, ...]:
    return (
        f"torch.rsqrt({under})", f"torch.rsqrt({under})", f"1 / torch.sqrt({under})", f"({under}).pow(-0.5)",
        f"({under}).sqrt().reciprocal()", f"torch.sqrt(1 / ({under}))", f"1 / ({under}) ** 0.5", f"torch.sqrt({under}) ** -1",
        f"torch.exp(-0.5 * torch.log({under}))", f"torch.exp2(torch.log2({under}) / -2)",
    )  # fmt: skip


def norm_of_a_sum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Layer norm of a sum, which may be used, too."""
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
    matrix = "total" if miss == "dimensions" else draw.choice(("total", "total", f"total.view(-1, {width})"))
    back = "" if matrix == "total" else ".view(total.shape)"
    norm = f"torch.nn.functional.layer_norm({matrix}, {size}, {weight}, {bias}, {epsilon}){back}"
    end = draw.choice(("normed", "normed + total", "torch.relu(total) * normed"))
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, 3, width), (rows, 3, width), (width,), (width,))
    return Spelling("lift_add_layer_norm", (f"total = {total}", f"normed = {norm}", end), shapes, miss)


def rms_norm_of_a_sum(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """RMS norm of a sum, which is used, too."""
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-2))
    miss = draw.choice(("alpha", "operand", "weight")) if wrong else ""
    total = {"alpha": "torch.add(x0, x1, alpha=2)", "operand": "x0 + x1[:1]"}.get(
        miss, draw.choice(("x0 + x1", "x1 + x0", "(x0.float() + x1.float()).to(x0.dtype)"))
    )
    matrix, back = draw.choice((("total", ""), ("total.flatten(0, 1)", ".view(total.shape)")))
    # The norm alone takes a float32 weight beside halves; what adds before it takes one dtype.
    wide = f"normed = torch.ops.npu.npu_rms_norm(total.half(), x2.float(), {epsilon})[0].to(x0.dtype)"
    lines = (
        f"total = {total}",
        f"matrix = {matrix}.float()",
        f"root = torch.rsqrt(matrix.pow(2).mean(-1, keepdim=True) + {epsilon})",
        wide if miss == "weight" else f"normed = (x2 * (matrix * root).to(x0.dtype)){back}",
        draw.choice(("normed + total", "normed - 2 * total")),
    )
    return Spelling("lift_add_rms_norm", lines, ((rows, 3, width), (rows, 3, width), (width,)), miss)


def layer_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Spelled out, or torch's with a scale and a shift behind it."""
    return (_scaled_norm if draw.random() < 1 / 3 else _layer_norm)(draw, rows, wrong)


def _scaled_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """A norm whose scale and shift come from the step, as in DiT."""
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-5, 1e-2))
    miss = draw.choice(("rows", "bias", "dimensions")) if wrong else ""
    size = f"(3, {width})" if miss == "dimensions" else f"({width},)"
    bias = "x2[0, 0]" if miss == "bias" else "None"
    affine = plus_times(draw, "x2", "normed", "scale")
    ends = (affine, affine, times(draw, "normed", "scale"))
    lines = (
        f"normed = torch.nn.functional.layer_norm(x0, {size}, None, {bias}, {epsilon})",
        f"scale = {draw.choice(('1 + x1', '(x1 + 1)', 'x1'))}",
        draw.choice(ends),
    )
    images = rows if miss == "rows" else 1
    return Spelling(
        "lift_layer_norm", lines, ((rows, 3, width), (images, 1, width), (images, 1, width)), miss, alone=True
    )


def _layer_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Layer norm, with a weight and a bias or one of them."""
    width, epsilon = draw.choice((16, 24)), draw.choice((1e-6, 1e-5, 1e-2))
    miss = draw.choice(("epsilon", "dimension", "correction", "variance", "mean")) if wrong else ""
    dim = 0 if miss == "dimension" else -1
    mean = f"wide.mean({dim}, keepdim=True)" + (" * 2" if miss == "mean" else "")
    of = "(wide + x1)" if miss == "variance" else "wide"
    variances = [f"{of}.var({dim}, correction={int(miss == 'correction')}, keepdim=True)"]
    if miss not in {"correction", "variance"}:
        variances += [f"{square}.mean({dim}, keepdim=True)" for square in ("centred.pow(2)", "(centred * centred)")]
        plain = f"wide.mean({dim}, keepdim=True)"
        squared = draw.choice((f"{plain}.pow(2)", f"{plain} * {plain}"))
        variances += [f"({draw.choice(('wide.pow(2)', '(wide * wide)'))}.mean({dim}, keepdim=True) - {squared})"]
    under = draw.choice((f"variance + {epsilon}", f"{epsilon} + variance"))
    root = draw.choice((f"torch.rsqrt({under})", f"1 / torch.sqrt({under})"))
    deviations = ("torch.sqrt(variance)", f"wide.std({dim}, correction=0, keepdim=True)")
    root = f"1 / ({draw.choice(deviations)} + {epsilon})" if miss == "epsilon" else root
    normed = times(draw, "centred", "root")
    affine = plus_times(draw, "x2", "normed", "x1")
    ends = (affine, affine, times(draw, "normed", "x1"), "normed + x2")
    lines = (
        f"wide = {draw.choice(('x0.float()', 'x0'))}",
        f"centred = wide - {mean}",
        f"variance = {draw.choice(variances)}",
        f"root = {root}",
        f"normed = ({normed}).to(x0.dtype)",
        draw.choice(ends),
    )
    return Spelling("lift_layer_norm", lines, ((rows, 3, width), (width,), (width,)), miss, told=miss == "epsilon")


def group_norm(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Group norm before SiLU."""
    groups, epsilon = draw.choice((2, 3, 6)), draw.choice((1e-6, 1e-2))
    miss = draw.choice(("activation", "weight")) if wrong else ""
    weight, bias = ("None", "None") if miss == "weight" else ("x1", "x2")
    normed = f"torch.nn.functional.group_norm(x0, {groups}, {weight}, {bias}, {epsilon})"
    ends = ("torch.nn.functional.silu(normed)", "normed * torch.sigmoid(normed)")
    end = "torch.relu(normed)" if miss == "activation" else draw.choice(ends)
    return Spelling("lift_group_norm_silu", (f"normed = {normed}", end), ((rows, 6, 5), (6,), (6,)), miss, alone=True)
