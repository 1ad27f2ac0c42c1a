"""What elementwise operators return for dense tensors of one shape, without their meta kernels, which are slow Python.

The result then has that shape, is dense, and has a dtype that follows from those of the arguments: the meta kernel says
once which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import _torch_private

_DTYPES: dict[object, torch.dtype] = {}


def run_pointwise(
    mode: FakeTensorMode,
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    run: Callable[[], Any],
) -> Any:
    """What ``func`` returns for fake tensors of ``mode``, whose sizes are numbers.

    Args:
        mode: of the tensors.
        func: any operator.
        args: of the call.
        kwargs: of the call.
        run: asks its meta kernel.
    """
    given = (*args, *kwargs.values())
    tensors = [value for value in given if isinstance(value, torch.Tensor)]
    if not _is_plain(func) or kwargs.get("memory_format") is not None or not _are_alike(tensors):
        return run()
    key = (func, torch.get_default_dtype(), tuple(kwargs), *(_deciding(value) for value in given))
    if key not in _DTYPES:
        result = run()
        _DTYPES[key] = result.dtype
        return result
    with _torch_private.on_meta_tensors(mode):
        new = torch.empty(tensors[0].shape, dtype=_DTYPES[key], device="meta")
    return _torch_private.fake_of_meta(mode, new, tensors[0].device)


@cache
def _is_plain(func: OpOverload) -> bool:
    """Whether one new tensor is all that it returns, of a dtype that follows as everywhere in ATen; a client's need not."""
    schema = _torch_private.schema(func)
    tagged = func.namespace == "aten" and torch.Tag.pointwise in func.tags
    return tagged and not schema.is_mutable and [result.alias_info for result in schema.returns] == [None]


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they are dense, of one shape and on one device."""
    first = tensors[0]
    return all(
        tensor.shape == first.shape and tensor.device == first.device and tensor.is_contiguous() for tensor in tensors
    )


def _deciding(value: Any) -> object:
    """What of an argument decides the dtype of the result."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return type(value) if isinstance(value, (int, float)) else value
