"""Dtypes that the CPU's kernels lack: computes them in a wider dtype and rounds once at the end, as a device does.

The CPU refuses, for example, histograms of integers and some reductions of float16, with an error that names the dtype. Then
every tensor of that dtype is widened, the operator runs again, and its written results are rounded. float16 and bfloat16
become float32, in which a device's vector units compute them; bool becomes int64, and integers become float64, which
represents them exactly up to 2 ** 53. A few CPU kernels accept small floats and round intermediate values; they get float32
too. Indices of int32, which devices accept everywhere, become int64.
"""

from __future__ import annotations

import re
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload

__all__ = ["widened"]

_LACKING = re.compile(r"not (?:implemented|supported) for '(\w+)'|Unsupported datatype for \w+: ?(?:c10::)?(\w+)")
_INDEX = re.compile(r"\bLong(?:Tensor)?\b|[Ll]ong tensor|int64")
"""The CPU's error about indices that are not int64."""
_IMPRECISE = (
    *(
        "aten::addbmm",
        "aten::addr",
        "aten::cross",
        "aten::prod",
        "aten::cumprod",
        "aten::grid_sampler",
        "aten::upsample_",
    ),
    *("aten::_upsample_", "aten::_adaptive_avg_pool", "aten::adaptive_avg_pool", "aten::slow_conv_transpose"),
    *("aten::binary_cross_entropy", "aten::soft_margin_loss"),
)
"""Prefixes of operators whose CPU kernels round intermediate small floats, where a device rounds once."""
_TYPES: Mapping[str, tuple[torch.dtype, torch.dtype]] = MappingProxyType(
    {
        "Half": (torch.float16, torch.float32),
        "BFloat16": (torch.bfloat16, torch.float32),
        "Bool": (torch.bool, torch.int64),
        "Byte": (torch.uint8, torch.float64),
        "Char": (torch.int8, torch.float64),
        "Short": (torch.int16, torch.float64),
        "Int": (torch.int32, torch.float64),
        "Long": (torch.int64, torch.float64),
    }
)
"""By the dtype's name in an error: the missing dtype and its wider replacement."""


def widened(op: OpOverload) -> Callable[..., Any]:
    """Return a function that computes an operator on CPU tensors, in a wider dtype if the CPU lacks a kernel.

    Written arguments keep their dtype; new results may have the wider one.
    """
    plain = op._op  # noqa: SLF001 - as calling the overload, without its Python frame
    is_imprecise = op._schema.name.startswith(_IMPRECISE)
    written = [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)  # the public door to a schema
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def compute(*args: Any, **kwargs: Any) -> Any:
        types = _small_floats((args, kwargs)) if is_imprecise else None
        try:
            if types is None:
                return plain(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            types = _types_for(error, (args, kwargs))
            if types is None:
                raise
        wide_args, wide_kwargs = tree_map(partial(_widen, *types), (args, kwargs))
        result = compute(*wide_args, **wide_kwargs)
        for position, name in written:
            narrow, wide = (
                given[0][position] if position < len(args) else given[1].get(name)
                for given in ((args, kwargs), (wide_args, wide_kwargs))
            )
            for target, value in zip(tree_leaves(narrow), tree_leaves(wide), strict=True):
                if target is not value:
                    target.copy_(value)
        return result

    return compute


def _small_floats(given: Any) -> tuple[torch.dtype, torch.dtype] | None:
    """The small float dtype among the arguments, and float32; None if there is none."""
    found = {getattr(leaf, "dtype", leaf) for leaf in tree_leaves(given)}
    return next((types for types in (_TYPES["Half"], _TYPES["BFloat16"]) if types[0] in found), None)


def _types_for(error: Exception, given: Any) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtype that the CPU lacks and the wider one, from the error's text; None for any other error."""
    lacking = _LACKING.search(str(error))
    types = _TYPES.get(lacking[1] or lacking[2]) if lacking is not None else None
    if types is None and _INDEX.search(str(error)) is not None:
        types = (torch.int32, torch.int64)
    if types is None:
        return None
    narrow = types[0]
    return types if any(getattr(leaf, "dtype", leaf) == narrow for leaf in tree_leaves(given)) else None


def _widen(narrow: torch.dtype, wide: torch.dtype, value: Any) -> Any:
    """A tensor or dtype `narrow` as `wide`; everything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(wide) if value.dtype == narrow else value
    return wide if value is narrow else value
