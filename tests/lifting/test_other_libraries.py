"""Layers as other libraries write them, in words of our own: what each is lifted to, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from npugraph_ex.lifting import judging
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check

W = 64


@dataclass(frozen=True)
class Layer:
    """The lines of a program that ends with ``y``, the shapes of its inputs, and how often which form is lifted."""

    lines: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    lifted: tuple[str, ...] = ()
    reason: str = ""


HALVES = ((4, 2, W), (4, W // 2), (4, W // 2))
LAYERS = {
    # The layers of vLLM that need no kernel of its own.
    "a norm of a sum in float32, which is handed on": Layer(
        ("total = x0.float() + x1.float()", "root = torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)",
         "y = (total * root).to(x0.dtype) * x2, total.to(x0.dtype)"),
        ((4, W), (4, W), (W,)), ("lift_rms_norm", "lift_add_rms_norm", "lift_constants"),
    ),
    "SiLU of the first half, times the second": Layer(
        ("half = x0.shape[-1] // 2", "y = torch.nn.functional.silu(x0[..., :half]) * x0[..., half:]"), ((4, W),), ("lift_swiglu",),
    ),
    "GELU of the first half, times the second": Layer(
        ("half = x0.shape[-1] // 2", "y = torch.nn.functional.gelu(x0[..., :half], approximate='tanh') * x0[..., half:]"),
        ((4, W),), ("lift_geglu",),
    ),
    "halves of each head, turned by tables of half the width": Layer(
        ("cos, sin = x1[:, None], x2[:, None]", "a, b = x0.chunk(2, -1)",
         "y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)"),
        HALVES, ("lift_rotary",),
    ),
    "tables that are halves of one": Layer(
        ("cos, sin = x1[:, None].chunk(2, -1)", "a, b = x0.chunk(2, -1)",
         "y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)"),
        ((4, 2, W), (4, W)), ("lift_rotary",),
    ),
    "pairs of each head, turned by tables of half the width": Layer(
        ("cos, sin = x1[:, None], x2[:, None]", "a, b = x0[..., ::2], x0[..., 1::2]",
         "y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)"),
        HALVES, ("lift_rotary",),
    ),
    "turned back": Layer(
        ("cos, sin = x1[:, None], x2[:, None]", "a, b = x0.chunk(2, -1)",
         "y = torch.cat((a * cos + b * sin, b * cos - a * sin), -1)"), HALVES,
    ),
    "pairs by tables of several dimensions": Layer(
        ("a, b = x0[..., ::2], x0[..., 1::2]", "y = torch.stack((a * x1 - b * x2, b * x1 + a * x2), -1).flatten(-2)"),
        ((2, 3, 4, W), (2, 3, 4, W // 2), (2, 3, 4, W // 2)), reason="the operator takes tables along one dimension",
    ),
    # GPT-OSS in transformers.
    "tables in float32": Layer(
        ("a, b = x0.chunk(2, -1)", "cos, sin = x1.float() * 1.5, x2.float() * 1.5",
         "y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x0.dtype)"),
        ((2, 4, 3, W), (2, 1, 3, W // 2), (2, 1, 3, W // 2)), ("lift_rotary",),
    ),
    # torchtitan.
    "pairs as complex numbers": Layer(
        ("turn = torch.polar(torch.ones_like(x1.float()), x1.float())[:, None]",
         "pairs = torch.view_as_complex(x0.float().unflatten(-1, (-1, 2)))",
         "y = torch.view_as_real(pairs * turn).flatten(-2).to(x0.dtype)"), HALVES[:2], ("lift_repeated",),
        "a product of complex numbers is one kernel",
    ),
    "shared heads under the diagonal": Layer(
        ("q, k, v = (x.transpose(1, 2) for x in (x0, x1.repeat_interleave(2, 2), x2.repeat_interleave(2, 2)))",
         "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, W_)"),
        ((2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)), ("lift_constants", "lift_shared_heads", "lift_attention_layout"),
    ),
    # diffusers.
    "pairs of a row, by unbind": Layer(
        ("a, b = x0.unflatten(-1, (-1, 2)).unbind(-1)", "turned = torch.stack((-b, a), -1).flatten(-2)",
         "y = (x0.float() * x1.float() + turned.float() * x2.float()).to(x0.dtype)"),
        ((2, 4, 5, W), (1, 1, 5, W), (1, 1, 5, W)), ("lift_rotary",),
    ),
    "halves of a row, by unbind": Layer(
        ("a, b = x0.unflatten(-1, (2, -1)).unbind(-2)", "y = x0 * x1 + torch.cat((-b, a), -1) * x2"),
        ((2, 4, 5, W), (1, 1, 5, W), (1, 1, 5, W)), ("lift_rotary",),
    ),
    "GELU of the second half, times the first": Layer(
        ("value, gate = x0.chunk(2, -1)", "y = value * torch.nn.functional.gelu(gate)"), ((4, W),), ("lift_geglu",),
    ),
    "a norm with scale and shift of the step": Layer(
        ("scale, shift = x1[:, None].chunk(2, -1)",
         "y = torch.nn.functional.layer_norm(x0, (W_,), None, None, 1e-6) * (1 + scale) + shift"),
        ((2, 4, W), (2, 2 * W)), reason="the operator takes",
    ),
    "a norm with scale and shift of the step, of one image": Layer(
        ("scale, shift = x1[:, None].chunk(2, -1)",
         "y = torch.nn.functional.layer_norm(x0, (W_,), None, None, 1e-6) * (1 + scale) + shift"),
        ((1, 4, W), (1, 2 * W)), ("lift_layer_norm",),
    ),
    "heads of an attention processor": Layer(
        ("q, k, v = ((x0 @ w.t()).view(2, -1, 4, 16).transpose(1, 2) for w in (x1, x2, x3))",
         "y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, -1, W_) + x0"),
        ((2, 5, W), (W, W), (W, W), (W, W)), ("lift_attention_layout",),
    ),
    "SiLU of a group norm, and what was before it": Layer(
        ("y = torch.nn.functional.silu(torch.nn.functional.group_norm(x0, 4, x1, x2, 1e-6)) + x0",),
        ((2, 8, 4, 4), (8,), (8,)), ("lift_group_norm_silu",),
    ),
    "sines and cosines of a step": Layer(
        ("rates = torch.exp(-0.3 * torch.arange(32, dtype=torch.float32, device=x0.device))",
         "angles = x0[:, None].float() * rates", "y = torch.cat((angles.cos(), angles.sin()), -1).to(x0.dtype)"), ((4,),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer_of_another_library(name: str, dtype: str) -> None:
    """Eager mode, the lifted graph and its replay agree, and exactly these forms are lifted."""
    layer = LAYERS[name]
    judging.forget()
    names = ", ".join(f"x{position}" for position in range(len(layer.shapes)))
    lines = [line.replace("W_", str(W)) for line in layer.lines]
    source = "\n    ".join([f"def program({names}):", *lines, "return y if isinstance(y, tuple) else (y,)"]) + "\n"
    inputs = tuple(Input(shape, dtype, seed=position) for position, shape in enumerate(layer.shapes))
    outcome = check(Case(source, inputs, sizes=({}, {}), options={"lift": "judged"}))
    assert outcome.failures == []
    assert outcome.report is not None
    found = {rule.name: len(rule.fusions) for rule in outcome.report.rules if rule.fusions}
    assert found == dict.fromkeys(layer.lifted, 1), outcome.report.table()
    assert layer.reason in " / ".join(outcome.near_misses)
