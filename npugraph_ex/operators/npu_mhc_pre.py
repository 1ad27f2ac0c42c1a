"""Manifold-constrained hyper-connections before a layer: the streams of the residual mixed into the layer's input, and gradients.

Formula (operator documentation of ``torch_npu.npu_mhc_pre``), for each token with its n streams x [n, D]::

    h_mix   = (gamma * flat(x)) phi^T
    inv_rms = 1 / sqrt(mean(flat(x)^2) + norm_eps)
    pre, post, res = the parts of n, n and n * n of h_mix * inv_rms, each times its alpha, plus its part of bias
    h_pre  = sigmoid(pre) + hc_eps
    h_post = 2 * sigmoid(post)
    h_res  = res as [n, n]
    h_in   = sum over the streams of h_pre * x

With two alphas there is no res. ``inner_precise=1`` rounds the factors of the product to HF32, a float with ten bits of fraction.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_SOURCE = "operator documentation of torch_npu.npu_mhc_pre"


def _hf32(value: torch.Tensor, inner_precise: int) -> torch.Tensor:
    """``value`` rounded half away from zero to ten bits of fraction, if ``inner_precise`` is 1 and it is float32."""
    if inner_precise not in {0, 1}:
        raise unsupported("npu_mhc_pre", "inner_precise", inner_precise, "0 and 1")
    if not inner_precise or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return (((bits >> 12) + 1 >> 1) << 13).view(torch.float32)


def _inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 4, 16).bfloat16(), torch.randn(24, 64) / 8, torch.rand(3), torch.randn(24)


@Operator(
    name="npu::npu_mhc_pre",
    source=_SOURCE,
    covers={"out_flag": (0, 1)},
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(*_inputs(), gamma=torch.rand(4, 16), out_flag=1),
        lambda: call(torch.randn(2, 3, 4, 16).half(), torch.randn(8, 64), torch.rand(2), torch.randn(8)),
    ),
)
def npu_mhc_pre(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor,
    *,
    gamma: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    out_flag: int = 0,
    inner_precise: int = 0,
) -> tuple[torch.Tensor, ...]:
    """``(h_in, h_post, h_res, inv_rms, h_mix, h_pre)``: h_in in x's dtype, the others float32 (float64 for float64).

    x [..., n, D] with one or two leading dimensions; phi [n * n + 2n, n * D], alpha [3], bias [n * n + 2n], or [2n, n * D], [2],
    [2n]; gamma [n, D]. With two alphas h_res has shape [1] and is 0.
    """
    dtype = compute_dtype(x, phi)
    streams, wide = x.shape[-2], x.to(dtype)
    flat = wide.flatten(-2)
    inv_rms = torch.rsqrt(flat.square().mean(-1) + norm_eps)
    weighted = flat if gamma is None else flat * gamma.to(dtype).flatten()
    h_mix = _hf32(weighted, inner_precise) @ _hf32(phi.to(dtype), inner_precise).mT
    parts = [streams, streams, streams * streams][: alpha.numel()]
    scaled = (
        h_mix
        * inv_rms.unsqueeze(-1)
        * alpha.to(dtype).repeat_interleave(torch.tensor(parts, device=alpha.device), output_size=sum(parts))
    )
    pre, post, *res = (scaled + bias.to(dtype)).split(parts, -1)
    h_pre = torch.sigmoid(pre) + hc_eps
    h_res = res[0].unflatten(-1, (streams, streams)).contiguous() if res else h_mix.new_zeros(1)
    h_in = (h_pre.unsqueeze(-1) * wide).sum(-2)
    return h_in.to(x.dtype), 2 * torch.sigmoid(post), h_res, inv_rms, h_mix, h_pre


def _of_backward() -> Call:
    x, phi, alpha, bias = _inputs()
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = npu_mhc_pre(x, phi, alpha, bias, gamma=torch.rand(4, 16))
    grads = (torch.randn_like(value) for value in (h_in, h_post, h_res))
    return call(x, phi, alpha, *grads, inv_rms, h_mix, h_pre, h_post, torch.rand(4, 16))


@Operator(
    name="npu::npu_mhc_pre_backward", source=_SOURCE, dtypes=(torch.float16, torch.bfloat16), examples=(_of_backward,)
)
def npu_mhc_pre_backward(
    x: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    grad_h_in: torch.Tensor,
    grad_h_post: torch.Tensor,
    grad_h_res: torch.Tensor,
    inv_rms: torch.Tensor,
    h_mix: torch.Tensor,
    h_pre: torch.Tensor,
    h_post: torch.Tensor,
    gamma: torch.Tensor | None = None,
    hc_eps: float = 1e-6,
    grad_x_post: torch.Tensor | None = None,
    inner_precise: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x (like x), phi, alpha, bias and gamma (float32; 0 without gamma), from what the forward operator gave.

    ``grad_x_post`` is added to the gradient of x.
    """
    if alpha.numel() != 3:
        raise unsupported("npu_mhc_pre_backward", "alpha", f"{alpha.numel()} elements", "3 elements")
    if inner_precise:
        raise unsupported("npu_mhc_pre_backward", "inner_precise", inner_precise, "0")
    dtype = compute_dtype(x, phi)
    streams, wide, to_in = x.shape[-2], x.to(dtype), grad_h_in.to(dtype).unsqueeze(-2)
    flat = wide.flatten(-2)
    gate = h_pre.to(dtype) - hc_eps
    to_parts = (
        (to_in * wide).sum(-1) * gate * (1 - gate),
        grad_h_post.to(dtype) * h_post.to(dtype) * (1 - h_post.to(dtype) / 2),
        grad_h_res.to(dtype).flatten(-2),
    )
    tokens = tuple(range(x.dim() - 2))
    inverse = inv_rms.to(dtype).unsqueeze(-1)
    normal = (h_mix.to(dtype) * inverse).split([streams, streams, streams * streams], -1)
    to_alpha = torch.stack([(part * value).sum() for part, value in zip(to_parts, normal, strict=True)])
    to_normal = torch.cat([part * scale for part, scale in zip(to_parts, alpha.to(dtype).unbind(), strict=True)], -1)
    to_mix = to_normal * inverse
    to_inverse = (to_normal * h_mix.to(dtype)).sum(-1, keepdim=True)
    weights = torch.ones_like(flat[:1]) if gamma is None else gamma.to(dtype).flatten()
    to_weighted = to_mix @ phi.to(dtype)
    to_x = (to_weighted * weights - to_inverse * inverse**3 / flat.shape[-1] * flat).view(x.shape)
    to_x = to_x + h_pre.to(dtype).unsqueeze(-1) * to_in
    if grad_x_post is not None:
        to_x = to_x + grad_x_post.to(dtype)
    to_gamma = (
        (to_weighted * flat).sum(tokens)
        if gamma is not None
        else torch.zeros(flat.shape[-1:], dtype=dtype, device=x.device)
    )
    return (
        to_x.to(x.dtype).contiguous(),
        to_mix.flatten(0, -2).mT @ (flat * weights).flatten(0, -2),
        to_alpha,
        torch.cat(to_parts, -1).sum(tokens),
        to_gamma.view(x.shape[-2:]),
    )
