"""The references have their operators' signatures, and shapes, dtypes and strides of their meta functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from operator_metas import has_meta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS
from npugraph_ex.versions import operator_schemas
from npugraph_ex_conformance.operator_checks import signature_faults

OF_NPU = [name for name, record in OPERATORS.items() if not record.schema and record.overload is not None]
OTHER_SCHEMAS, OTHER_METAS = (
    (operator_schemas.OTHER_SCHEMAS, operator_schemas.OTHER_METAS)
    if operator_schemas.DIFFERENCE.older
    else (frozenset(), frozenset())
)
"""The operators of which the installed torch_npu says something else than the references."""
WITH_META = sorted(
    name for name in set(OF_NPU) - OTHER_METAS if OPERATORS[name].formula and has_meta(OPERATORS[name].overload)
)
HALF_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def operator(name: str) -> torch._ops.OpOverload:
    """The overload that a record is of."""
    found = OPERATORS[name].overload
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", sorted(name for name in OF_NPU if OPERATORS[name].formula and name not in OTHER_SCHEMAS)
)
def test_signature_is_the_schema(name: str) -> None:
    """Names, order, defaults and keyword-only arguments equal the operator's schema, also of the functions beside the formula."""
    assert list(signature_faults(OPERATORS[name])) == []


def as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """A fake npu tensor of the same metadata; anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")


def assert_same_metadata(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The reference on CPU tensors and the meta function on fake npu ones give the same metadata, if no record denies it."""
    if name in OTHER_METAS:
        return
    mode = FakeTensorMode()
    fake_args, fake_kwargs = pytree.tree_map(lambda value: as_fake(mode, value), (args, kwargs))
    with mode:
        expected = operator(name)(*fake_args, **fake_kwargs)
    actual = OPERATORS[name].formula(*args, **kwargs)
    facts = [
        [
            (t.shape, t.dtype, t.stride()) if isinstance(t, torch.Tensor) else type(t)
            for t in pytree.tree_leaves(outputs)
        ]
        for outputs in (actual, expected)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("name", WITH_META)
def test_examples_match_their_meta_functions(name: str) -> None:
    """Every record's own example calls."""
    for example in OPERATORS[name].calls():
        assert_same_metadata(name, *example)


SHAPES = ((8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8), (2, 0, 8))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_match_their_meta_functions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ranks 1 to 4 and zero sizes; gamma of one dimension and of all but the first."""
    x = torch.randn(shape).to(dtype)
    for gamma in {x.shape[-1:], x.shape[1:] or x.shape}:
        weight = torch.ones(gamma, dtype=dtype)
        assert_same_metadata("npu::npu_rms_norm", (x, weight), {})
        rstd = OPERATORS["npu::npu_rms_norm"].formula(x, weight)[1]
        assert_same_metadata("npu::npu_rms_norm_backward", (x, x, weight, rstd), {})
        assert_same_metadata("npu::npu_add_rms_norm", (x, x.clone(), weight, 1e-5), {})


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_quantisers_match_their_meta_functions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With and without smoothing, output masks and written default dtypes."""
    x, vector = torch.randn(shape).to(dtype), torch.ones(shape[-1], dtype=dtype)
    quant, fused = "npu::npu_dynamic_quant", "npu::npu_add_rms_norm_dynamic_quant"
    for kwargs in ({}, {"smooth_scales": vector}, {"dst_type": torch.int8}, {"dst_type": 1}):
        assert_same_metadata(quant, (x,), kwargs)
    both = {"smooth_scale1": vector, "smooth_scale2": vector}
    for kwargs in (
        {},
        {"smooth_scale1": vector, "beta": vector, "epsilon": 1e-5},
        both,
        {**both, "output_mask": [True, True]},
        {"output_mask": [True, True]},
        {"smooth_scale2": vector, "output_mask": [False, True]},
        {"output_mask": [True, False], "y_dtype": 1},
    ):
        assert_same_metadata(fused, (x, x.clone(), vector), kwargs)


def test_permuted_layouts_match_their_meta_functions() -> None:
    """``empty_like`` keeps a permuted layout, plain allocation does not; the references follow each operator."""
    x = torch.randn(4, 3, 8).transpose(0, 1)
    weight = torch.ones(8)
    assert_same_metadata("npu::npu_rms_norm", (x, weight), {})
    assert_same_metadata("npu::npu_add_rms_norm", (x, x.contiguous(), weight), {})
    assert_same_metadata("npu::npu_dynamic_quant", (x,), {})
    assert_same_metadata("npu::npu_add_rms_norm_dynamic_quant", (x, x, weight), {})
    assert_same_metadata("npu::npu_dtype_cast", (x, torch.float16), {})
    assert_same_metadata("npu::_npu_dtype_cast", (x, torch.float16), {})
    assert_same_metadata("npu::npu_swiglu", (x,), {})


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_activations_match_their_meta_functions(dtype: torch.dtype) -> None:
    """Casts, SwiGLU along either dimension and rotary embedding in both modes."""
    x = torch.randn(2, 4, 6, 8).to(dtype)
    for target in (torch.float32, torch.float16, torch.int32, 15):
        assert_same_metadata("npu::npu_dtype_cast", (x, target), {})
    assert_same_metadata("npu::_npu_dtype_cast", (x, torch.bfloat16), {})
    assert_same_metadata("npu::npu_swiglu", (x,), {})
    assert_same_metadata("npu::npu_swiglu", (x, 1), {})
    for mode in ("half", "interleave"):
        assert_same_metadata("npu::npu_rotary_mul", (x, x[:1, :, :1], x[:1, :, :1], mode), {})


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_and_cast_match_their_meta_function(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ranks 1 to 4 and zero sizes, gamma of one dimension and of all but the first, and a permuted layout."""
    x = torch.randn(shape).to(dtype)
    for gamma in {x.shape[-1:], x.shape[1:] or x.shape}:
        assert_same_metadata("npu::npu_add_rms_norm_cast", (x, x.clone(), torch.ones(gamma, dtype=dtype), 1e-5), {})
    if shape == (2, 3, 8):  # strides of sizes 0 and 1 are anyone's
        turned = x.transpose(0, 1)
        assert_same_metadata(
            "npu::npu_add_rms_norm_cast", (turned, turned, torch.ones(turned.shape[-1:], dtype=dtype)), {}
        )


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("code", [torch.int8, torch.qint8, torch.quint8, torch.qint32, torch.int32, 1, 12, 0, 13])
def test_quantize_matches_its_meta_function(code: object, dtype: torch.dtype) -> None:
    """Every covered output, dividing and multiplying, any axis, a permuted layout."""
    x, name = torch.randn(2, 3, 8).to(dtype), "npu::npu_quantize"
    assert_same_metadata(name, (x, torch.ones(3), None, code), {})
    assert_same_metadata(name, (x, torch.ones(8), torch.ones(8, dtype=torch.int32), code, -1), {})
    assert_same_metadata(name, (x.transpose(0, 1), torch.ones(1), None, code, -1), {})
    if code in (torch.int8, torch.qint8, 1, 12):
        assert_same_metadata(name, (x, torch.ones(1, 3, 1), None, code, -2, False), {})


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_norm_and_static_quantisation_match_their_meta_function(dtype: torch.dtype) -> None:
    """One and two quantisations, with and without zero points, bias and division."""
    x, vector = torch.randn(2, 3, 8).to(dtype), torch.ones(8, dtype=dtype)
    scales, points, name = torch.ones(8), torch.ones(8, dtype=torch.int32), "npu::npu_add_rms_norm_quant"
    for kwargs in (
        {},
        {"beta": vector},
        {"div_mode": False},
        {"scales2": scales, "zero_points2": points},
        {"dst_type": 1},
    ):
        assert_same_metadata(name, (x, x.clone(), vector, scales, points), kwargs)
        assert_same_metadata(name, (x.transpose(0, 1), x.transpose(0, 1), vector, scales, None), kwargs)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_swiglu_and_quantisation_match_their_meta_function(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ranks 2 to 4 and zero sizes, either half activated."""
    for kwargs in ({}, {"activate_left": True}):
        assert_same_metadata("npu::npu_swiglu_quant", (torch.randn(shape).to(dtype),), {"quant_mode": 1, **kwargs})


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_transposed_product_matches_its_meta_function(dtype: torch.dtype) -> None:
    """Both orders of the first operand, explicit and default permutations, split batches."""
    name, b = "npu::npu_transpose_batchmatmul", torch.randn(4, 8, 6).to(dtype)
    assert_same_metadata(name, (torch.randn(4, 3, 8).to(dtype), b), {})
    other = torch.randn(3, 4, 8).to(dtype)
    for kwargs in ({}, {"perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}, {"batch_split_factor": 2}):
        assert_same_metadata(name, (other, b), {"perm_x1": [1, 0, 2], **kwargs})


@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16])
def test_quant_matmul_matches_its_meta_function(output: torch.dtype) -> None:
    """Plain and batched products, per-token scales and biases."""
    x1, x2 = torch.ones(3, 16, dtype=torch.int8), torch.ones(16, 5, dtype=torch.int8)
    scale, token = torch.ones(5), torch.ones(3)
    name: str = "npu::npu_quant_matmul"
    assert_same_metadata(name, (x1, x2, scale), {"pertoken_scale": token, "output_dtype": output})
    batched = (x1.expand(4, 3, 16), x2.expand(4, 16, 5), scale)
    assert_same_metadata(name, batched, {"output_dtype": torch.bfloat16})
    bias = torch.ones(5, dtype=torch.int32)
    assert_same_metadata(name, (x1, x2, scale), {"bias": bias})


@pytest.mark.parametrize("name", OF_NPU)
def test_records_name_arguments_of_the_schema(name: str) -> None:
    """What a record says of arguments, it says of arguments that the operator has; a workspace's operator exists."""
    record, known = OPERATORS[name], [argument.name for argument in operator(name)._schema.arguments]
    assert {*record.writes, *record.host_arguments, *record.synonyms} <= {*known}
    assert not record.workspace or hasattr(torch.ops.npu, record.workspace.removeprefix("npu::"))


def test_records_cannot_be_changed() -> None:
    """One user's override must not change every other user's formula."""
    with pytest.raises(TypeError):
        OPERATORS["npu::npu_rms_norm"] = print
    with pytest.raises(AttributeError):
        OPERATORS["npu::npu_rms_norm"].formula = print
