"""Dtypes that the CPU's kernels lack: computes them in a wider dtype and rounds once at the end, as a device does.

The CPU refuses, for example, histograms of integers and some reductions of float16, with an error that names the dtype. Then
every tensor of that dtype is widened, the operator runs again, and its written results are rounded. float16 and bfloat16
become float32, in which a device's vector units compute them; bool becomes int64, and integers become float64, which
represents them exactly up to 2 ** 53. Some CPU kernels accept small floats and round intermediate values; they get float32
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
    from collections.abc import Callable, Mapping, Sequence

    from torch._ops import OpOverload

__all__ = ["WRITTEN_IN_TRAINING", "rounding_once", "widened"]

WRITTEN_IN_TRAINING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"aten::native_batch_norm": ("running_mean", "running_var")}
)
"""Arguments that an operator writes where `training` is true, though its schema does not say so."""

_LACKING = re.compile(r"not (?:implemented|supported) for '(\w+)'|Unsupported datatype for \w+: ?(?:c10::)?(\w+)")
_INDEX = re.compile(r"\bLong(?:Tensor)?\b|[Ll]ong tensor|int64")
"""The CPU's error about indices that are not int64."""
_NAMES = """
    addbmm addr cross linalg_cross prod cumprod histc logit polygamma pow _trilinear linspace logspace
    convolution _convolution slow_conv _slow_conv thnn_conv _conv conv_tbc col2im grid_sampler
    upsample_ _upsample_ _adaptive_avg_pool adaptive_avg_pool
    native_batch_norm _native_batch_norm native_layer_norm native_group_norm _log_softmax glu_backward
    binary_cross_entropy soft_margin_loss mse_loss huber_loss nll_loss
    index_put _index_put _unsafe_index_put _unsafe_masked_index_put put index_reduce _embedding_bag
"""
_IMPRECISE = tuple(f"aten::{name}" for name in _NAMES.split())
"""Prefixes of operators whose CPU kernels round intermediate small floats, where a device rounds once."""
_WITH_ALPHA = frozenset(f"aten::{name}" for name in ("add", "sub", "rsub", "_foreach_add", "_foreach_sub"))
_WITH_ALPHA = _WITH_ALPHA | {f"{name}_" for name in _WITH_ALPHA}
"""Operators whose CPU kernels round the product of the second value and its factor. The vendor's tests expect this rounding
for lists of float16, too, but one rounding for lists of bfloat16."""
_FIRST_FACTORS = MappingProxyType({"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1})
"""Matrix products, and the position of their first factor."""
_LARGE_PRODUCT = 1 << 27
"""Multiplications from which on a product of float16 goes through float32, where the CPU is up to sixty times as fast."""
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
    factor = _FIRST_FACTORS.get(op._schema.name)
    is_imprecise = op._schema.name.startswith(_IMPRECISE)
    has_alpha, is_list = op._schema.name in _WITH_ALPHA, op._schema.name.startswith("aten::_foreach_")
    written = [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)  # the public door to a schema
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in WRITTEN_IN_TRAINING.get(op._schema.name, ())
    ]

    def compute(*args: Any, **kwargs: Any) -> Any:
        rounds = is_imprecise or (has_alpha and (kwargs.get("alpha", 1) != 1 or args[2:] not in {(), (1,)}))
        rounds = rounds or (factor is not None and _is_slow(*args[factor : factor + 2]))
        types = _small_floats(args, kwargs) if rounds else None
        if has_alpha and is_list and types == _TYPES["Half"]:
            types = None
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


def _is_slow(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two factors have a product on which the CPU spends its time."""
    return first.dtype == torch.float16 and first.numel() * second.shape[-1] >= _LARGE_PRODUCT


def _small_floats(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.dtype, torch.dtype] | None:
    """The small float dtype among the arguments, and float32; None if there is none."""
    found = set()
    values = [*args, *kwargs.values()]
    for value in values:  # which grows; pytrees take as long as a small operator
        if isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, (torch.Tensor, torch.dtype)):
            found.add(value if isinstance(value, torch.dtype) else value.dtype)
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


def rounding_once(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes in float32 where the first argument is a small float, and rounds the results to its type."""

    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        types = _small_floats([first], {})
        if types is None:
            return compute(first, *args, **kwargs)
        narrow, wide = types
        wide_args, wide_kwargs = tree_map(partial(_widen, *types), ((first, *args), kwargs))
        return tree_map(partial(_widen, wide, narrow), compute(*wide_args, **wide_kwargs))

    return run
