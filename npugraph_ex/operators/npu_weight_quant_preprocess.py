"""Quantised weights brought to the memory format that the products of 8-bit tokens and 4-bit weights read fastest.

On hardware the weights lie in a fractal order (FRACTAL_NZ_C0_16) afterwards. Their values, shapes and strides, which are all that
a program sees, stay as they are; the results here have those, in plain order.

Source: op-plugin, opapi/WeightQuantPreprocessKernelNpuOpApi.cpp.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._record import Call, Operator, call

_NAME = "npu_weight_quant_preprocess"
_E4M3, _E2M1, _E8M0 = (24, 292), (45, 296), (44, 293)
_ACCEPTED = {"x_dtype": _E4M3, "weight_dtype": _E2M1, "weight_scale_dtype": _E8M0, "x_scale_dtype": _E8M0}


def _transposed(tensor: torch.Tensor, axis: int) -> bool:
    """Whether ``axis`` and the next one lie in memory the other way round."""
    return tensor.stride(axis + 1) == tensor.stride(axis) * tensor.shape[axis]


def _constraints(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_dtype: int,
    weight_dtype: int,
    weight_scale_dtype: int,
    weight_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_scale_dtype: int | None = None,
    k_group_size: int | None = 0,
) -> None:
    """The one combination of dtypes that the device takes, and weights whose last two dimensions are transposed."""
    del weight_offset, bias
    if k_group_size not in {None, 0, 32}:
        raise refused(_NAME, "k_group_size", k_group_size, "32, or 0")
    given = {
        "x_dtype": x_dtype,
        "weight_dtype": weight_dtype,
        "weight_scale_dtype": weight_scale_dtype,
        "x_scale_dtype": x_scale_dtype,
    }
    for name, accepted in _ACCEPTED.items():
        if given[name] not in accepted:
            raise refused(_NAME, name, given[name], f"{accepted[-1]}")
    if weight.dim() not in {2, 3} or weight_scale.dim() != weight.dim() + 1:
        raise refused(
            _NAME,
            "weight and weight_scale",
            (tuple(weight.shape), tuple(weight_scale.shape)),
            "of 2 and 3, or of 3 and 4 dimensions",
        )
    for name, tensor in (("weight", weight), ("weight_scale", weight_scale)):
        if not _transposed(tensor, weight.dim() - 2):
            raise refused(_NAME, name, tensor.stride(), "transposed: its rows are columns in memory")


def _example() -> Call:
    weight = torch.randint(0, 256, (64, 128), dtype=torch.uint8).T
    scale = torch.randint(120, 130, (64, 2, 2), dtype=torch.uint8).transpose(0, 1)
    return call(weight, scale, 292, 296, 293, x_scale_dtype=293, k_group_size=32)


@Operator(
    name=f"npu::{_NAME}",
    source="op-plugin, opapi/WeightQuantPreprocessKernelNpuOpApi.cpp",
    examples=(_example,),
    constraints=_constraints,
)
def npu_weight_quant_preprocess(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_dtype: int,
    weight_dtype: int,
    weight_scale_dtype: int,
    weight_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    x_scale_dtype: int | None = None,
    k_group_size: int | None = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(weight, weight_scale, weight_offset, bias)``, like those given; an empty tensor for one that is not."""
    del x_dtype, weight_dtype, weight_scale_dtype, x_scale_dtype, k_group_size
    offset, added = (weight.new_empty(0) if given is None else given.clone() for given in (weight_offset, bias))
    return weight.clone(), weight_scale.clone(), offset, added
