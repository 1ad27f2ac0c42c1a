"""Memory formats: the emulated device has one, so a cast between formats only copies the tensor.

On hardware `npu_format_cast(x, 29)` stores x in fractal order (FRACTAL_NZ) for the cube unit. A program sees the same values,
shapes and strides there, and also here; `get_npu_format` always returns ND.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["format_kernels"]


def format_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels of the format casts by operator name."""
    return {
        "npu::npu_format_cast": _copied,
        "npu::npu_format_cast.Tensor": _copied,
        "npu::_npu_format_cast": _copied,
        "npu::_npu_format_cast.aclnn": _copied,
        "npu::_npu_format_cast.input_dtype": _copied,
        "npu::npu_format_cast_": _itself,
        "npu::npu_format_cast_.acl_format": _itself,
    }


def _copied(source: torch.Tensor, *ignored: object, **also_ignored: object) -> torch.Tensor:
    """Return a copy: the result of a cast has its own memory."""
    del ignored, also_ignored
    return source.clone()


def _itself(source: torch.Tensor, *ignored: object, **also_ignored: object) -> torch.Tensor:
    del ignored, also_ignored
    return source
