"""Gradients of Fourier transforms, which torch_npu has as operators of their own and the CPU has not.

A transform is linear: its gradient is its adjoint, the transform in the other direction with the same scale.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TRANSFORM_GRADIENTS"]

_UNSCALED, _BY_ROOT = 0, 1
"""torch's numbers for how a transform is scaled: not at all, and by 1 / sqrt(n)."""


def _adjoint(grad: torch.Tensor, dim: list[int], normalization: int) -> torch.Tensor:
    return torch._fft_c2c(grad, dim, normalization, False)  # noqa: FBT003, SLF001 - the operator that torch.fft is made of


def _real_to_complex(
    grad: torch.Tensor,
    dim: list[int],
    normalization: int,
    onesided: bool,  # noqa: FBT001
    last_dim_size: int,
) -> torch.Tensor:
    """Return the gradient of rfftn, real, of size `last_dim_size` in the last of `dim`."""
    if onesided:  # what was not computed has no gradient
        missing = last_dim_size - grad.shape[dim[-1]]
        shape = list(grad.shape)
        shape[dim[-1]] = missing
        grad = torch.cat([grad, grad.new_zeros(shape)], dim[-1])
    return _adjoint(grad, dim, normalization).real


def _complex_to_real(grad: torch.Tensor, dim: list[int], normalization: int) -> torch.Tensor:
    """Return the gradient of irfftn: the half spectrum, in which all but the ends stand for two elements."""
    found = torch._fft_r2c(grad, dim, normalization, True)  # noqa: FBT003, SLF001 - as above
    found.narrow(dim[-1], 1, grad.shape[dim[-1]] - found.shape[dim[-1]]).mul_(2)
    return found


def _window(given: torch.Tensor, n_fft: int, win_length: int, window: torch.Tensor | None) -> torch.Tensor:
    """Return the window as stft uses it: in the middle of `n_fft` elements."""
    window = given.new_ones(win_length) if window is None else window
    left = (n_fft - win_length) // 2
    return torch.nn.functional.pad(window, (left, n_fft - win_length - left))


def _stft(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    grad: torch.Tensor,
    given: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,  # noqa: FBT001, FBT002
    onesided: bool | None = None,  # noqa: FBT001
    return_complex: bool | None = None,  # noqa: FBT001
) -> torch.Tensor:
    """Return the gradient of stft by its input, [B, L] or [L]; `grad` is [B, frequencies, frames], complex or in pairs."""
    spectrum = grad if return_complex else torch.view_as_complex(grad.contiguous())
    frames = spectrum.mT  # [B, frames, frequencies]
    scale = _BY_ROOT if normalized else _UNSCALED
    if given.is_complex():
        frames = _adjoint(frames, [frames.dim() - 1], scale)
    else:
        frames = _real_to_complex(frames, [frames.dim() - 1], scale, onesided is not False, n_fft)
    shape = _window(given, n_fft, win_length or n_fft, window)
    frames = frames * shape.conj()
    step = hop_length or n_fft // 4
    return torch.ops.aten.unfold_backward(frames, given.shape, given.dim() - 1, n_fft, step)  # type: ignore[no-any-return]


TRANSFORM_GRADIENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "npu::fft_r2c_backward": _real_to_complex,
        "npu::fft_c2r_backward": _complex_to_real,
        "npu::stft_backward": _stft,
    }
)
