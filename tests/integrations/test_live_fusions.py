"""The four fusions that vLLM-Ascend registers, by its way of registering: a list of real tensors and its stream check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from other_kernels import kernels_in_their_place
from torch._inductor.pattern_matcher import Match

import npugraph_ex as nge

EPS = 1e-6
HEAD, HEADS = 16, 2
WIDTH = 32


def same_stream(match: Match) -> bool:
    """The client's check: the matched operators are all on one stream, the default one or a labelled one."""
    return len({node.meta.get("stream_label") for node in match.nodes if node.op == "call_function"}) == 1


def _norm_bias(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Any:
    y, rstd, summed = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return (y if bias is None else y + bias), rstd, summed


def _quantize(x: Any, scale: Any, reciprocal: Any, offset: Any) -> Any:
    return torch.ops.npu.npu_quantize(x, scale, offset, torch.int8, -1, True)


def _norm_rope(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    width = HEAD * HEADS
    parts = []
    for part, weight in ((qkv[:, :width], q_weight), (qkv[:, width : 2 * width], k_weight)):
        heads = part.reshape(1, part.shape[0], HEADS, HEAD)
        normed = torch.ops.npu.npu_rms_norm(heads, weight, EPS)[0]
        parts.append(torch.ops.npu.npu_rotary_mul(normed, cos, sin).reshape(part.shape))
    return parts[0], parts[1], qkv[:, 2 * width :].clone()


def _mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 share an exponent: the OCP microscaling format with float8_e4m3fn elements."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp_min(2.0**-126))) - 8
    scaled = (blocks * torch.exp2(-exponent).unsqueeze(-1)).clamp(-448, 448)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8).unsqueeze(-2)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(left) * right).to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    """The client's own operators, in small, and MX quantisation that gives equal values fused and in two steps."""
    norm = "(Tensor x, Tensor r, Tensor w, Tensor? b, float e) -> (Tensor, Tensor, Tensor)"
    rope = "(Tensor qkv, Tensor qw, Tensor kw, Tensor cos, Tensor sin) -> (Tensor, Tensor, Tensor)"
    namespaces = {
        "_C_ascend": [("npu_add_rms_norm_bias", norm, _norm_bias)],
        "vllm": [
            ("quantize", "(Tensor x, Tensor s, Tensor r, Tensor o) -> Tensor", _quantize),
            ("qkv_rmsnorm_rope", rope, _norm_rope),
            ("muls_add", "(Tensor x, Tensor y, float scale) -> Tensor", lambda x, y, scale: x * scale + y),
        ],
    }
    libraries = []
    for namespace, operators in namespaces.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for name, schema, function in operators:
            library.define(name + schema)
            library.impl(name, function, "CompositeExplicitAutograd")
        libraries.append(library)
    kernels = {
        "npu::npu_dynamic_mx_quant": lambda x, **_: _mx(x),
        "npu::npu_swiglu_mx_quant": lambda x, **_: _mx(_swiglu(x)),
    }
    with kernels_in_their_place(kernels):
        yield
    for library in libraries:
        library._destroy()


@dataclass(frozen=True)
class Fusion:
    """One rule of the client's, and the operator that must appear."""

    search: Callable[..., Any]
    replace: Callable[..., Any]
    inputs: Callable[[], list[torch.Tensor]]
    fused: Callable[[], Any]


def _half(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float16, device="npu")


def _norm_quant_search(  # noqa: PLR0917 - the client's operands
    x: Any, residual: Any, weight: Any, bias: Any, scale: Any, reciprocal: Any, offset: Any
) -> Any:
    output = torch.ops._C_ascend.npu_add_rms_norm_bias(x, residual, weight, bias, EPS)
    return torch.ops.vllm.quantize(output[0], scale, reciprocal, offset), output[2]


def _norm_quant_replace(  # noqa: PLR0917 - as above
    x: Any, residual: Any, weight: Any, bias: Any, scale: Any, reciprocal: Any, offset: Any
) -> Any:
    output = torch.ops.npu.npu_add_rms_norm_quant(x, residual, weight, scale, offset, epsilon=EPS, beta=bias)
    return output[0], output[2]


def _norm_quant_inputs() -> list[torch.Tensor]:
    scale = torch.full((WIDTH,), 0.03125, dtype=torch.float16, device="npu")
    return [_half(4, WIDTH), _half(4, WIDTH), _half(WIDTH), _half(WIDTH), scale, 1 / scale, torch.zeros_like(scale)]


def _rope_search(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    width = HEAD * HEADS
    q, k, v = qkv.split([width, width, width], dim=-1)
    q_norm, _ = torch.ops.npu.npu_rms_norm(q.view(1, q.shape[0], HEADS, HEAD), q_weight, EPS)
    k_norm, _ = torch.ops.npu.npu_rms_norm(k.view(1, k.shape[0], HEADS, HEAD), k_weight, EPS)
    q_rope = torch.ops.npu.npu_rotary_mul(q_norm, cos, sin)
    k_rope = torch.ops.npu.npu_rotary_mul(k_norm, cos, sin)
    return q_rope.view(q.shape), k_rope.view(k.shape), v


def _rope_replace(qkv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any) -> Any:
    q, k, _ = torch.ops.vllm.qkv_rmsnorm_rope(qkv, q_weight, k_weight, cos, sin)
    return q, k, qkv.split([HEAD * HEADS] * 3, dim=-1)[2]


def _rope_inputs() -> list[torch.Tensor]:
    rows = 5
    return [_half(rows, 3 * HEAD * HEADS), _half(HEAD), _half(HEAD), _half(1, rows, 1, HEAD), _half(1, rows, 1, HEAD)]


def _mx_search(x: Any) -> Any:
    quantised = torch.ops.npu.npu_dynamic_mx_quant(torch.ops.npu.npu_swiglu(x), dst_type=torch.float8_e4m3fn)
    return quantised[0], quantised[1]


def _mx_replace(x: Any) -> Any:
    # torch_npu 2.13 calls it activate_left; the client's activation_left belongs to another version.
    output = torch.ops.npu.npu_swiglu_mx_quant(x, activate_left=True, dst_type=torch.float8_e4m3fn)
    return output[0], output[1]


FUSIONS = {
    "add_rms_norm_bias_quant": Fusion(
        _norm_quant_search,
        _norm_quant_replace,
        _norm_quant_inputs,
        lambda: torch.ops.npu.npu_add_rms_norm_quant.default,
    ),
    "qk_norm_rope": Fusion(_rope_search, _rope_replace, _rope_inputs, lambda: torch.ops.vllm.qkv_rmsnorm_rope.default),
    "muls_add": Fusion(
        lambda x, y: x * 1.0 + y,
        lambda x, y: torch.ops.vllm.muls_add(x, y, 1.0),
        lambda: [_half(2, 64), _half(2, 64)],
        lambda: torch.ops.vllm.muls_add.default,
    ),
    "mx_quant": Fusion(
        _mx_search, _mx_replace, lambda: [_half(2, 128)], lambda: torch.ops.npu.npu_swiglu_mx_quant.default
    ),
}


def _compiled(
    fusion: Fusion, label: Callable[[list[Any]], None] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Eager and compiled results on equal inputs, and how often the fused operator is in the graph."""
    count = 0

    def before(gm: Any, inputs: Any, config: Any) -> None:
        if label is not None:
            label([node for node in gm.graph.nodes if node.op == "call_function"])

    def after(gm: Any, inputs: Any, config: Any) -> None:
        nonlocal count
        count = len(gm.graph.find_nodes(op="call_function", target=fusion.fused()))

    # The client's options; its passes leave graphs to the engine, which captures.
    options = {"force_eager": True, "inplace_pass": False, "clone_input": False, "clone_output": False}
    passes = {"post_grad_custom_pre_pass": before, "post_grad_custom_post_pass": after}
    torch.compiler.reset()
    compiled = torch.compile(fusion.search, backend="npugraph_ex", fullgraph=True, options={**options, **passes})
    inputs = fusion.inputs()
    with torch.no_grad():
        want, have = fusion.search(*inputs), compiled(*inputs)
    return [want] if isinstance(want, torch.Tensor) else want, [have] if isinstance(have, torch.Tensor) else have, count


def _same(want: torch.Tensor, have: torch.Tensor) -> None:
    assert (want.shape, want.dtype, want.stride()) == (have.shape, have.dtype, have.stride())
    if want.dtype == torch.int8:
        # The sum with the bias is rounded to float16 in one and not in the other: a tie may fall either way.
        difference = (want.cpu().int() - have.cpu().int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.05
    else:
        torch.testing.assert_close(have.cpu().float(), want.cpu().float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", FUSIONS)
def test_it_fuses_with_equal_values(name: str) -> None:
    """Registered twice, with a list of real tensors: fused once, and results as in eager mode."""
    fusion = FUSIONS[name]
    how = {"search_fn": fusion.search, "replace_fn": fusion.replace, "extra_check": same_stream}
    with (
        nge.register_replacement(**how, example_inputs=fusion.inputs()),
        nge.register_replacement(**how, example_inputs=fusion.inputs()),
    ):
        want, have, count = _compiled(fusion)
    assert count == 1, nge.last_report()
    assert sum(result.abs().float().sum().item() for result in have if result.dtype != torch.uint8) > 0
    for one, other in zip(want, have, strict=True):
        _same(one, other)


@pytest.mark.parametrize("name", FUSIONS)
def test_it_does_not_fuse_across_streams(name: str) -> None:
    """One operator on another stream: the client's check refuses, and results stay as they are."""
    fusion = FUSIONS[name]

    def label(nodes: list[Any]) -> None:
        launching = [node for node in nodes if "getitem" not in str(node.target)]
        launching[-1].meta["stream_label"] = "side"

    with nge.register_replacement(
        search_fn=fusion.search, replace_fn=fusion.replace, example_inputs=fusion.inputs(), extra_check=same_stream
    ):
        want, have, count = _compiled(fusion, label)
    assert count == 0
    for one, other in zip(want, have, strict=True):
        _same(one, other)


def test_the_stream_check_is_what_refuses() -> None:
    """A check that returns False refuses where one that returns True does not: it is really asked, with `match.nodes`."""
    fusion = FUSIONS["muls_add"]
    asked: list[int] = []

    def refuse(match: Match) -> bool:
        asked.append(len(match.nodes))
        return False

    with nge.register_replacement(
        search_fn=fusion.search, replace_fn=fusion.replace, example_inputs=fusion.inputs(), extra_check=refuse
    ):
        assert _compiled(fusion)[2] == 0
    assert asked == [2]


def test_the_older_keyword_leaves_the_rule_out() -> None:
    """The client's replacement with `activation_left`, which this torch_npu does not know: one warning, and no fusion."""
    fusion = FUSIONS["mx_quant"]

    def replace(x: Any) -> Any:
        output = torch.ops.npu.npu_swiglu_mx_quant(x, activation_left=True, dst_type=torch.float8_e4m3fn)
        return output[0], output[1]

    with nge.register_replacement(
        search_fn=fusion.search, replace_fn=replace, example_inputs=fusion.inputs(), extra_check=same_stream
    ):
        want, have, count = _compiled(fusion)
    assert count == 0
    for one, other in zip(want, have, strict=True):
        _same(one, other)
    assert math.isfinite(float(have[0].float().sum()))
