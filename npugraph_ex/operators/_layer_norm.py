"""What the operators around layer normalisation have in common: the norm over trailing dimensions, and its gradients."""

from __future__ import annotations

import torch


def normalise(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd)`` in the dtype of ``x``; statistics keep the dimensions that ``gamma`` has, with size 1."""
    over = trailing(x, gamma)
    mean = x.mean(dim=over, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(dim=over, keepdim=True) + epsilon)
    return (x - mean) * rstd * gamma.to(x.dtype) + beta.to(x.dtype), mean, rstd


def gradients(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx, dgamma, dbeta)`` in the dtype of ``x``: dx is ``rstd * (g - mean(g) - x^ * mean(g * x^))`` with g = dy * gamma."""
    over = trailing(x, gamma)
    lead = tuple(range(x.dim() - gamma.dim()))
    normal = (x - mean.to(x.dtype)) * rstd.to(x.dtype)
    scaled = dy * gamma.to(x.dtype)
    correction = scaled.mean(dim=over, keepdim=True) + normal * (scaled * normal).mean(dim=over, keepdim=True)
    dgamma, dbeta = ((part.sum(dim=lead) if lead else part) for part in (dy * normal, dy))
    return rstd.to(x.dtype) * (scaled - correction), dgamma, dbeta


def trailing(x: torch.Tensor, gamma: torch.Tensor) -> tuple[int, ...]:
    """The dimensions that are normalised: as many of the last ones as ``gamma`` has, which must be of its sizes."""
    if gamma.dim() == 0 or tuple(x.shape[-gamma.dim() :]) != tuple(gamma.shape):
        raise ValueError(
            f"gamma must have the trailing dimensions of x, which has shape {tuple(x.shape)}; its shape is {tuple(gamma.shape)}."
        )
    return tuple(range(-gamma.dim(), 0))
