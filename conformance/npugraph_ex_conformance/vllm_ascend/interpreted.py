"""The client's fused kernel in Triton's interpreter, with what Ascend's Triton has and the interpreter lacks.

Only where Triton is installed can this module be imported.
"""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import TensorHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["fused_kernel"]

_SOURCE = "ops/triton/linearnorm/split_qkv_rmsnorm_rope.py"
_CORES = 2


def _tensor(data: np.ndarray[Any, Any], dtype: Any) -> Any:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.shape else dtype)


class _Language(ModuleType):
    """Triton's language with blocks of any size, and float32 for bfloat16, which the interpreter does not compute."""

    bfloat16 = tl.dtype("fp32")

    @staticmethod
    def arange(start: int, end: int) -> Any:
        return _tensor(np.arange(start, end, dtype=np.int32), tl.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


def _to(tensor: Any, dtype: Any) -> Any:
    """A tensor's method `to`, which rounds to bfloat16."""
    converted = tl.cast(tensor, dtype)
    if dtype is not _Language.bfloat16:
        return converted
    return _tensor(torch.from_numpy(converted.handle.data).bfloat16().float().numpy(), dtype)


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _extract_slice(tensor: Any, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> Any:
    assert set(strides) == {1}
    return _tensor(tensor.handle.data[_box(offsets, sizes)].copy(), tensor.dtype)


def _insert_slice(tensor: Any, part: Any, offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> Any:
    assert set(strides) == {1}
    data = tensor.handle.data.copy()
    data[_box(offsets, sizes)] = part.handle.data
    return _tensor(data, tensor.dtype)


def _get_element(tensor: Any, place: tuple[int, ...]) -> Any:
    return _tensor(tensor.handle.data[place].reshape(1), tensor.dtype)


def fused_kernel(name: str) -> Callable[..., Any]:
    """The kernel from the client's own file, which gets these stand-ins for what it imports and registers no operator."""
    client: Any = find_spec("vllm_ascend")
    spec: Any = spec_from_file_location("interpreted_kernel", Path(client.origin).parent / _SOURCE)
    module: Any = module_from_spec(spec)
    imports: dict[str, Any] = {
        "vllm.triton_utils": SimpleNamespace(tl=_Language("tl"), triton=triton),
        "vllm.utils.torch_utils": SimpleNamespace(direct_register_custom_op=lambda **_: None),
        "vllm_ascend.ops.triton.triton_utils": SimpleNamespace(
            extract_slice=_extract_slice, get_element=_get_element, insert_slice=_insert_slice,
            get_vectorcore_num=lambda: _CORES,
        ),
    }  # fmt: skip
    with patch.dict(sys.modules, imports):
        spec.loader.exec_module(module)
    module.language = tl  # the interpreter looks for it among the globals

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        wide = tree_map_only(torch.Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, (args, kwargs))
        try:
            # The first wants powers of two.
            with patch.object(tl.core, "validate_block_shape", math.prod), patch.object(tl.tensor, "to", _to):
                results = module.split_qkv_rmsnorm_rope_impl(*wide[0], **wide[1])
        except Exception as error:
            raise RuntimeError(f"{name}: Triton's interpreter cannot run the client's kernel: {error}") from error
        return tuple(result.to(args[0].dtype) for result in results)

    return run
