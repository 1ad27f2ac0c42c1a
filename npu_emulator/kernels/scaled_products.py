"""Products of 8-bit floats with scales, `torch._scaled_mm` and `torch._scaled_grouped_mm` and their second versions.

    out = (a * scale_a) @ (b * scale_b) + bias

in float32, rounded once. A scale belongs to the whole factor, to a row of a or a column of b, to blocks of 128 elements along
the sum (and 1 or 128 across), or, as a power of two (float8_e8m0fnu), to 32 elements along it: [m, k / 64, 2] and [k / 64, n, 2].
In the grouped product the rows of a that end at offs[i] belong to matrix i of b; rows behind the last group are 0.

As in op-plugin, the shapes of the scales decide what they are; recipes, swizzles and `use_fast_accum` change nothing, and only
Ascend950 has these operators. Groups of k, a b shared by all groups and batches without `offs` are refused there, and here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.registry import CONSTRAINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SCALED_PRODUCTS"]

_Tensor = torch.Tensor
_Scales = list[torch.Tensor]
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_POWER, _POWERS_OF = torch.float8_e8m0fnu, 32
_BLOCK = 128
_RESULTS = (torch.float32, torch.bfloat16, torch.float16)
_GROUPED, _GROUPED_V2 = "_scaled_grouped_mm", "_scaled_grouped_mm_v2"
_DIMENSIONS = {_GROUPED: "{} dimension must be 2D or 3D", _GROUPED_V2: "Input tensor {} must be 2D or 3D"}
_NOT_TAKEN = {_GROUPED: "yet", _GROUPED_V2: "parameter"}
_ONE_RESULT = {
    _GROUPED: f"{_GROUPED} on NPU only supports BF16 output type",
    _GROUPED_V2: f"NPU {_GROUPED_V2} only supports BF16 output type",
}


def _up(size: int, unit: int) -> int:
    return -(-size // unit)


def _turned(scale: _Tensor) -> _Tensor:
    """The scale of b as one of the rows of b.mT."""
    return scale.transpose(0, 1) if scale.dim() > 1 else scale


def _scaled(factor: _Tensor, scale: _Tensor) -> tuple[_Tensor, _Tensor]:
    """A factor [rows, depth] times the scales of its blocks, and what remains: a scale of each row, [rows, 1] or [1, 1]."""
    values, wide, (rows, depth) = factor.float(), scale.float(), factor.shape
    if scale.dtype == _POWER:
        spread = wide.flatten(-2).repeat_interleave(_POWERS_OF, 1)
    elif scale.numel() in {1, rows} and scale.shape[1:].numel() == 1:
        return values, wide.reshape(-1, 1)
    else:
        across = 1 if scale.shape[0] == rows else _BLOCK
        spread = wide.repeat_interleave(across, 0)[:rows].repeat_interleave(_BLOCK, 1)
    return values * spread[:, :depth], values.new_ones(1, 1)


def _product(a: _Tensor, b: _Tensor, scale_a: _Tensor, scale_b: _Tensor) -> _Tensor:
    left, of_rows = _scaled(a, scale_a)
    right, of_columns = _scaled(b.mT, _turned(scale_b))
    return (left @ right.mT) * of_columns.mT * of_rows


def _mm(
    a: _Tensor,
    b: _Tensor,
    scale_a: _Tensor,
    scale_b: _Tensor,
    bias: _Tensor | None = None,
    *others: Any,
    out_dtype: torch.dtype | None = None,
    **unused: Any,
) -> _Tensor:
    del unused
    # Only one of the arguments behind bias is a dtype; its place depends on the version.
    out_dtype = next((other for other in others if isinstance(other, torch.dtype)), out_dtype)
    out = _product(a, b, scale_a, scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _grouped(
    a: _Tensor, b: _Tensor, scale_a: _Tensor, scale_b: _Tensor, offs: _Tensor, *unused: Any, **also_unused: Any
) -> _Tensor:
    del unused, also_unused
    out = torch.zeros(a.shape[0], b.shape[2], dtype=torch.bfloat16, device=a.device)
    if offs.is_meta:
        return out
    ends = offs.tolist()
    if ends != sorted(ends) or not 0 <= ends[0] <= ends[-1] <= a.shape[0]:
        raise RuntimeError(f"offs must be the ends of groups of the {a.shape[0]} rows of mat_a, got {ends}")
    scales = scale_b.unsqueeze(0) if scale_b.dim() == b.dim() else scale_b
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        out[start:end] = _product(a[start:end], b[group], scale_a[start:end], scales[group])
    return out


def _require(condition: bool, text: str) -> None:  # noqa: FBT001
    if not condition:
        raise RuntimeError(text)


def _require_chip(operator: str) -> None:
    chip = torch.npu.get_device_name()
    _require(chip.startswith("Ascend950"), f"{operator} is supported only on Ascend950 and later; this chip is {chip}")


def _same_order(factor: _Tensor, scale: _Tensor) -> bool:
    """Whether a factor and its scale are both transposed in memory, or neither."""
    matrices = [(tensor.shape[:2], tensor.stride()) for tensor in (factor, scale)]
    if any(tuple(size) == (1, 1) for size, _ in matrices):
        return True
    first, second = (stride[1] == stride[0] * size[0] for size, stride in matrices)
    return first == second


def _check_order(a: _Tensor, b: _Tensor, scale_a: _Tensor, scale_b: _Tensor) -> None:
    """Op-plugin's conditions on strides."""
    rows_and_columns = scale_a.dim() == scale_b.dim() == 2 and scale_a.shape[1] == scale_b.shape[0] == 1
    if rows_and_columns and a.dtype == b.dtype == torch.float8_e4m3fn:
        _require(a.stride(1) == 1, "mat_a must be contiguous in last dim")
        _require(b.stride(0) == 1, "mat_b must be contiguous in first dim")
    elif scale_a.dim() > 1 < scale_b.dim():
        for name, factor, scale in (("a", a, scale_a), ("b", b, scale_b)):
            _require(_same_order(factor, scale), f"mat_{name} and scale_{name} must both be transposed, or neither")


def _check_scale(name: str, factor: _Tensor, scale: _Tensor) -> None:
    """A scale that does not fit the rows and the depth of its factor; both as of b.mT for b."""
    rows, depth = factor.shape
    if scale.dtype == _POWER:
        fits = tuple(scale.shape) == (rows, _up(depth, 2 * _POWERS_OF), 2)
    else:
        per_row = scale.numel() in {1, rows} and scale.shape[1:].numel() == 1
        fits = per_row or tuple(scale.shape) in {(across, _up(depth, _BLOCK)) for across in (rows, _up(rows, _BLOCK))}
    _require(fits, f"{name} fits neither the tensor, nor rows, columns or blocks of it: shape {tuple(scale.shape)}")


def _check_bias(bias: _Tensor, columns: int, out_dtype: torch.dtype) -> None:
    _require(bias.numel() == columns, f"Bias must be size {columns}, got {bias.numel()}")
    _require(out_dtype != torch.float32, "Bias is not supported when out_dtype is set to Float32")
    _require(bias.dtype in _RESULTS[1:], f"Bias must be BFloat16 or Half, got {bias.dtype}")
    wanted = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}.get(out_dtype)
    _require(
        wanted is None or bias.dtype == out_dtype, f"Bias must be {wanted} to compute {out_dtype}, got {bias.dtype}"
    )


def _check_mm(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    a: _Tensor,
    b: _Tensor,
    scale_a: _Tensor,
    scale_b: _Tensor,
    bias: _Tensor | None = None,
    scale_result: _Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002
) -> None:
    del use_fast_accum
    _require_chip("_scaled_mm")
    for name, factor, scale in (("a", a, scale_a), ("b", b, scale_b)):
        _require(factor.dtype in _FLOAT8, f"mat_{name} must be float8 type, e4m3fn or e5m2, got {factor.dtype}")
        _require(factor.dim() == 2, f"mat_{name} must be a matrix, got {factor.dim()} dimensions")
        _require(
            scale.dtype in {torch.float32, _POWER},
            f"scale_{name} must be float32 or float8_e8m0 type, got {scale.dtype}",
        )
    _require(torch.float8_e4m3fn in {a.dtype, b.dtype}, "Multiplication of two Float8_e5m2 matrices is not supported")
    _require(
        a.shape[1] == b.shape[0], f"mat_a and mat_b shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})"
    )
    _require(scale_result is None, "scale_result is not supported currently: no result is float8")
    if bias is not None:
        _check_bias(bias, b.shape[1], out_dtype or torch.bfloat16)
    _require(out_dtype in _RESULTS, f"out_dtype must be Float32, BFloat16, or Float16, got {out_dtype}")
    _require(scale_a.dtype == scale_b.dtype, "scale_a and scale_b must have one dtype")
    _check_scale("scale_a", a, scale_a)
    _check_scale("scale_b", b.mT, _turned(scale_b))
    _check_order(a, b, scale_a, scale_b)


def _check_mm_v2(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    a: _Tensor,
    b: _Tensor,
    scale_a: _Scales,
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: _Scales,
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: _Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002
) -> None:
    del swizzle_a, swizzle_b, use_fast_accum
    lists = (scale_a, scale_b, recipe_a, recipe_b)
    _require(
        all(len(given) == 1 for given in lists), "Unsupported scaling configuration: one scale and recipe a factor"
    )
    _check_mm(a, b, scale_a[0], scale_b[0], bias, None, out_dtype)
    if contraction_dim:
        _require(len(contraction_dim) == 2, f"contraction_dim must have exactly 2 elements, got {contraction_dim}")
        along_a, along_b = contraction_dim
        _require(
            a.shape[along_a] == b.shape[along_b], f"dimensions {along_a} of mat_a and {along_b} of mat_b differ in size"
        )


def _check_grouped(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    a: _Tensor,
    b: _Tensor,
    scale_a: _Tensor,
    scale_b: _Tensor,
    offs: _Tensor | None = None,
    bias: _Tensor | None = None,
    scale_result: _Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,  # noqa: FBT001, FBT002
    operator: str = _GROUPED,
) -> None:
    del use_fast_accum
    _require_chip(operator)
    for name, factor, scale, most in (("a", a, scale_a, 3), ("b", b, scale_b, 4)):
        _require(factor.dtype in _FLOAT8, f"mat_{name} must be float8 type, e4m3fn or e5m2, got {factor.dtype}")
        _require(factor.dim() in {2, 3}, f"{_DIMENSIONS[operator].format('mat_' + name)}, got {factor.dim()}D")
        _require(
            scale.dtype in {torch.float32, _POWER}, f"scale_{name} must be float32 or float8_e8m0fnu, got {scale.dtype}"
        )
        ranks, kind = (range(2, most + 1), "mx") if scale.dtype == _POWER else (range(1, 3), "fp8")
        said = " or ".join(f"{rank}D" for rank in ranks)
        _require(scale.dim() in ranks, f"scale_{name} dimension must be {said} for {kind}, got {scale.dim()}D")
    sizes = f"mat_a {tuple(a.shape)}, mat_b {tuple(b.shape)}"
    _require(a.shape[-1] == b.shape[-2], f"contraction dimension mismatch between mat_a and mat_b: {sizes}")
    if operator == _GROUPED_V2:
        _require(a.shape[-1] % 16 == 0, f"mat_a trailing dimension must be multiple of 16: {sizes}")
        _require(b.shape[-2] % 16 == b.shape[-1] % 16 == 0, f"mat_b dimensions must be multiple of 16: {sizes}")
    for name, tensor in (("bias", bias), ("scale_result", scale_result)):
        _require(tensor is None, f"NPU {operator} does not support {name} {_NOT_TAKEN[operator]}")
    needed = a.dim() == 2 or b.dim() == 2
    _require((offs is not None) == needed, "offsets required when using 2D input tensor, and only then")
    if offs is not None:
        _require(offs.dim() == 1, f"offsets tensor must be 1D, got {offs.dim()}D")
        _require(offs.dtype == torch.int32, f"offsets data type must be int32, got {offs.dtype}")
    _require(out_dtype in {None, torch.bfloat16}, f"{_ONE_RESULT[operator]}, not {out_dtype}")
    _require(b.dim() == 3 and (a.dim() == 2 or len(b) > 1), f"K_SPLIT (group_type=2) is not supported yet: {sizes}")
    _require(
        offs is not None and len(offs) == len(b), f"mat_a must be 2D, with an entry of offs for each group: {sizes}"
    )
    _check_grouped_scales(a, b, scale_a, scale_b)


def _check_grouped_scales(a: _Tensor, b: _Tensor, scale_a: _Tensor, scale_b: _Tensor) -> None:
    """The shapes for a 2D mat_a [m, k] and a 3D mat_b [g, k, n]."""
    (groups, k, n), pairs = b.shape, _up(b.shape[1], 2 * _POWERS_OF)
    wanted = [(len(a),), (groups, n)]
    if scale_a.dtype == _POWER:
        wanted = [(len(a), pairs, 2), (groups, pairs, n, 2)]
        scale_b = scale_b.unsqueeze(0) if groups == 1 and scale_b.dim() == 3 else scale_b
    found = [tuple(scale_a.shape), tuple(scale_b.shape)]
    _require(
        found == wanted and scale_a.dtype == scale_b.dtype,
        f"scale_a and scale_b must have one dtype and shapes {wanted}, got {found} for k = {k}",
    )
    if scale_a.dtype == torch.float32:
        _require(
            scale_a.stride(0) == scale_b.stride(1) == 1, "the last dimension of scale_a and scale_b must be contiguous"
        )


def _check_grouped_v2(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    a: _Tensor,
    b: _Tensor,
    scale_a: _Scales,
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: _Scales,
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    offs: _Tensor | None = None,
    bias: _Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *unused: Any,
    **also_unused: Any,
) -> None:
    del swizzle_a, swizzle_b, unused, also_unused
    single = all(len(given) == 1 for given in (scale_a, scale_b, recipe_a, recipe_b))
    if not single or not {a.dtype, b.dtype} <= {*_FLOAT8}:
        raise ValueError(
            "failed to find valid scaled gemm implementation: it takes float8 factors, one scale and one recipe each, got "
            f"{a.dtype} and {b.dtype}"
        )
    _check_grouped(a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype, operator=_GROUPED_V2)


def _of_lists(compute: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """The second version of an operator, from the first: lists of scales, with recipes and swizzles in between."""

    def run(  # noqa: PLR0913, PLR0917 - the operator's own arguments
        a: _Tensor,
        b: _Tensor,
        scale_a: _Scales,
        recipe_a: Sequence[int],
        swizzle_a: Sequence[int],
        scale_b: _Scales,
        recipe_b: Sequence[int],
        swizzle_b: Sequence[int],
        *others: Any,
        contraction_dim: Sequence[int] = (),
        use_fast_accum: bool = False,
        **named: Any,
    ) -> _Tensor:
        del recipe_a, swizzle_a, recipe_b, swizzle_b, contraction_dim, use_fast_accum
        return compute(a, b, scale_a[0], scale_b[0], *others, **named)

    return run


def _refusing(check: Callable[..., None], compute: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """The kernel, with its conditions; an out form has the same."""

    def constraints(*args: Any, out: _Tensor | None = None, **kwargs: Any) -> None:
        del out
        check(*args, **kwargs)

    vars(compute)[CONSTRAINTS] = constraints
    return compute


SCALED_PRODUCTS: Mapping[str, Callable[..., _Tensor]] = MappingProxyType(
    {
        "aten::_scaled_mm": _refusing(_check_mm, _mm),
        "aten::_scaled_mm_v2": _refusing(_check_mm_v2, _of_lists(_mm)),
        f"aten::{_GROUPED}": _refusing(_check_grouped, _grouped),
        f"aten::{_GROUPED_V2}": _refusing(_check_grouped_v2, _of_lists(_grouped)),
    }
)
