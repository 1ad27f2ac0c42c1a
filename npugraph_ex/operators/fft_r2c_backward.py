"""Gradients of Fourier transforms: from real to complex, from complex to real, and of short-time transforms.

A transform is linear: its gradient is its adjoint, the transform in the other direction with the same scale (documentation of
``torch.fft``; torch's derivatives).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import refused
from npugraph_ex.operators._record import Operator, call

_UNSCALED, _BY_ROOT = 0, 1
"""torch's numbers for how a transform is scaled: not at all, and by 1 / sqrt(n)."""


def _adjoint(grad: torch.Tensor, dim: list[int], normalization: int) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._fft_c2c(grad, dim, normalization, False)  # noqa: SLF001 - the operator behind torch.fft
    return result


@Operator(
    name="npu::fft_r2c_backward",
    source="documentation of torch.fft; torch's derivative of rfftn",
    dtypes=(torch.complex64,),
    examples=(
        lambda: call(torch.randn(3, 4, dtype=torch.complex64), [1], 0, True, 6),
        lambda: call(torch.randn(3, 6, dtype=torch.complex64), [0, 1], 1, False, 6),
    ),
)
def fft_r2c_backward(
    grad: torch.Tensor, dim: list[int], normalization: int, onesided: bool, last_dim_size: int
) -> torch.Tensor:
    """The gradient of ``rfftn``: real, of size ``last_dim_size`` in the last of ``dim``."""
    if onesided:  # what was not computed has no gradient
        missing = last_dim_size - grad.shape[dim[-1]]
        shape = list(grad.shape)
        shape[dim[-1]] = missing
        grad = torch.cat([grad, grad.new_zeros(shape)], dim[-1])
    return _adjoint(grad, dim, normalization).real


@Operator(
    name="npu::fft_c2r_backward",
    covers={"normalization": (0, 1, 2)},
    source="documentation of torch.fft; torch's derivative of irfftn",
    dtypes=(torch.float32,),
    examples=(lambda: call(torch.randn(3, 6), [0, 1], 2),),
)
def fft_c2r_backward(grad: torch.Tensor, dim: list[int], normalization: int) -> torch.Tensor:
    """The gradient of ``irfftn``: the half spectrum, in which all but the ends stand for two elements."""
    found: torch.Tensor = torch.ops.aten._fft_r2c(grad, dim, normalization, True)  # noqa: SLF001 - as above
    found.narrow(dim[-1], 1, grad.shape[dim[-1]] - found.shape[dim[-1]]).mul_(2)
    return found.contiguous()


def _window(given: torch.Tensor, n_fft: int, win_length: int, window: torch.Tensor | None) -> torch.Tensor:
    """The window as ``stft`` uses it: in the middle of ``n_fft`` elements."""
    window = given.new_ones(win_length) if window is None else window
    left = (n_fft - win_length) // 2
    return torch.nn.functional.pad(window, (left, n_fft - win_length - left))


@Operator(
    name="npu::stft_backward",
    source="documentation of torch.stft",
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            torch.randn(2, 5, 4, dtype=torch.complex64), torch.randn(2, 20), 8, 4, 6, torch.rand(6), return_complex=True
        ),
        lambda: call(
            torch.randn(2, 8, 4, 2),
            torch.randn(2, 20, dtype=torch.complex64),
            8,
            4,
            6,
            torch.randn(6, dtype=torch.complex64),
            onesided=False,
            return_complex=False,
        ),
    ),
)
def stft_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
) -> torch.Tensor:
    """Like ``input`` [B, L] or [L]; ``grad_output`` is [B, frequencies, frames], complex or in pairs."""
    spectrum = grad_output if grad_output.is_complex() else torch.view_as_complex(grad_output.contiguous())
    frames = spectrum.mT  # [B, frames, frequencies]
    if window is not None and window.is_complex() and not input.is_complex():
        raise refused("stft_backward", "window", window.dtype, "real, as input is")
    if input.is_complex() and frames.shape[-1] != n_fft:
        raise refused(
            "stft_backward", "grad_output", spectrum.shape, f"of {n_fft} frequencies, because input is complex"
        )
    scale = _BY_ROOT if normalized else _UNSCALED
    if input.is_complex():
        frames = _adjoint(frames, [frames.dim() - 1], scale)
    else:
        frames = fft_r2c_backward(frames, [frames.dim() - 1], scale, onesided is not False, n_fft)
    shape = _window(input, n_fft, win_length or n_fft, window)
    frames = frames * shape.conj()
    step = hop_length or n_fft // 4
    if step <= 0:
        raise refused("stft_backward", "hop_length", step, "positive")
    return torch.ops.aten.unfold_backward(frames, input.shape, input.dim() - 1, n_fft, step)  # type: ignore[no-any-return]
