"""Quantised products in operators that communicate: what the device refuses, scales of rows and columns. Holds no operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._floating_products import FloatingOperand, floating_product, values_of
from npugraph_ex.operators._integers import product, scale_of
from npugraph_ex.operators._microscaling import BLOCK
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._scalar_types import dtype_of

_UNDEFINED = (None, -1, 28)
"""How ``comm_quant_dtype`` says that nothing is quantised on the way; 28 is in the document's example."""
_POWERS_OF_TWO = (44, 293, torch.float8_e8m0fnu)
_FLOAT32 = (6, torch.float32)
MX_GROUPS = [1, 1, BLOCK]


def check_reserved(operator: str, **given: object) -> None:
    """Raise for a value of an argument that is there for later releases: those are None, 0 or False."""
    for name, value in given.items():
        undefined = _UNDEFINED if name == "comm_quant_dtype" else (None, 0)
        if isinstance(value, torch.Tensor) or value not in undefined:
            raise refused(operator, name, "a tensor" if isinstance(value, torch.Tensor) else value, "left out")


def check_way(operator: str, comm_mode: str | None, modes: Sequence[str | None] = (None, "ai_cpu", "ccu")) -> None:
    """Raise for a way to communicate that such factors do not have."""
    if comm_mode not in modes:
        raise refused(operator, "comm_mode", comm_mode, f"one of {', '.join(map(repr, modes))} for these factors")


def check_groups(operator: str, name: str, groups: Sequence[int] | None, sizes: Sequence[int]) -> None:
    """Raise for sizes of blocks other than ``sizes``; 0 leaves one to the shapes."""
    if groups and any(given not in {0, size} for given, size in zip(groups, sizes, strict=True)):
        raise refused(operator, name, list(groups), f"None or {list(sizes)}")


def result_dtype(
    operator: str, code: int | None, name: str = "y_dtype", allowed: Sequence[torch.dtype] = HALVES
) -> torch.dtype:
    """The dtype of a result, by its code."""
    dtype = None if code is None else dtype_of(code, operator, name)
    if dtype is None or dtype not in allowed:
        raise refused(operator, name, dtype, " or ".join(map(str, allowed)))
    return dtype


def check_shape(operator: str, name: str, tensor: torch.Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raise for a tensor that is not there or has another shape."""
    if tensor is None or tuple(tensor.shape) not in shapes:
        shown = None if tensor is None else tensor.shape
        raise refused(operator, f"{name}'s shape", shown, " or ".join(str(list(shape)) for shape in shapes))


def check_scale(
    operator: str,
    name: str,
    scale: torch.Tensor | None,
    code: int | None,
    numbers: Sequence[torch.dtype],
    *,
    in_blocks: bool,
) -> None:
    """Raise for a scale that is no power of two where blocks of 32 have one, and else for one in no dtype of ``numbers``.

    ``code`` says what the bytes are.
    """
    bytes_ = (torch.uint8, torch.float8_e8m0fnu)
    known = bytes_ if in_blocks else (*numbers, torch.float64)  # the last one in checks of precision
    codes = _POWERS_OF_TWO if in_blocks else _FLOAT32
    if scale is not None and (scale.dtype not in known or code not in (None, *codes)):
        expected = "float8_e8m0fnu (293)" if in_blocks else " or ".join(map(str, numbers))
        raise refused(operator, f"{name}'s dtype", (scale.dtype, code), expected)


def in_dtype(value: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """A result, rounded; one in float64 stays as it is."""
    return value if value.dtype == torch.float64 else value.to(target)


def operands(
    operator: str, factors: Sequence[torch.Tensor], codes: Sequence[int | None], names: Sequence[str]
) -> tuple[FloatingOperand, FloatingOperand]:
    """Both factors; raises unless both are 8-bit floats, both hifloat8 or both packed 4-bit floats."""
    left, right = (
        FloatingOperand(tensor, code, None, f"{name}_dtype")
        for tensor, code, name in zip(factors, codes, names, strict=True)
    )
    left.check(operator)
    right.check(operator)
    if not left.floating or (left.floating, left.hifloat, left.packed) != (right.floating, right.hifloat, right.packed):
        given = tuple((operand.tensor.dtype, operand.code) for operand in (left, right))
        raise refused(
            operator, f"the dtypes of {names[0]} and {names[1]}", given, "8-bit or 4-bit floats, alike in both"
        )
    return left, right


def depth(operand: FloatingOperand) -> int:
    """The elements of a row."""
    return operand.tensor.shape[-1] * (2 if operand.packed else 1)


def width(operand: FloatingOperand, k: int) -> int:
    """The columns of a right factor with ``k`` rows."""
    return operand.tensor.shape[-1] * (2 if operand.packed and operand.tensor.shape[-2] == k else 1)


def blocks(k: int) -> int:
    """How many pairs of blocks of 32 elements ``k`` of them are."""
    return -(-k // (2 * BLOCK))


def mx_product(
    operator: str,
    left: FloatingOperand,
    right: FloatingOperand,
    scales: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The product in float32 of factors with a power of two for each 32 elements: [m, k / 64, 2] and [k / 64, n, 2]."""
    return floating_product(
        operator, left._replace(scale=scales[0]), right._replace(scale=scales[1]), compute_dtype(bias), bias=bias
    )


def token_product(
    operator: str,
    factors: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The product of factors with a scale for each row and each column, ``[m]`` and ``[n]``, in float32.

    ``(x1 @ x2) * s1 * s2 + bias`` of int8 factors, and ``(x1 @ x2 + bias) * s1 * s2`` of 8-bit floats.
    """
    x1, x2 = factors
    wide = compute_dtype(*scales, bias)
    whole = x1.dtype == torch.int8
    if whole:
        out = product(x1, x2).to(wide)
    else:
        left, right = operands(operator, factors, (None, None), ("x1", "x2"))
        out = torch.matmul(values_of(operator, left, wide), values_of(operator, right, wide))
        out = out if bias is None else out + bias.to(wide)
    out = out * scales[0].to(wide).unsqueeze(1) * scale_of(scales[1]).to(wide)
    return out + bias.to(wide) if whole and bias is not None else out


def check_no_int4(operator: str, **codes: int | torch.dtype | None) -> None:
    """Raise for packed int4 factors."""
    for name, code in codes.items():
        if code in {285, torch.int32}:
            raise unsupported(operator, name, code, "int8 and 8-bit and 4-bit floats")
