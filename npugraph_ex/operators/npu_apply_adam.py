"""Steps of the optimisers Adam and AdamW, and of BERT's Adam, written over weights and moments.

Formula (CANN operator documentation, aclnnApplyAdam and aclnnApplyAdamW; operator documentation of
``torch_npu.npu_bert_apply_adam``; CANN's ops-nn, optim/apply_adam_v2), with g the gradient and (var, m, v) the arguments ``out``::

    m = beta1 * m + (1 - beta1) * g                 v = beta2 * v + (1 - beta2) * g^2

    adam:      var -= lr * sqrt(1 - beta2_power) / (1 - beta1_power) * m / (sqrt(v) + epsilon)
               use_nesterov: beta1 * m + (1 - beta1) * g in place of m
    adam_w:    m^ = m / (1 - beta1_power * beta1)      v^ = v / (1 - beta2_power * beta2)
               var  = var * (1 - lr * weight_decay) - lr * m^ / (sqrt(v^) + epsilon)
               maximize: -g in place of g
               amsgrad: max_grad_norm, which becomes max(max_grad_norm, v), in place of v below the root
    bert_adam: var -= lr * (m / (sqrt(v) + epsilon) + weight_decay * var)
               g is divided by global_grad_norm / max_grad_norm where that is above 1 and max_grad_norm is positive
               adam_mode 1: var -= step_size * m / (sqrt(v) + epsilon) + lr * weight_decay * var; step_size is lr where it is
               None, and g is not divided
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_DTYPES = (torch.float16, torch.float32)


def _moments(
    g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, beta1: float, beta2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments after the step, in the dtype of ``g``."""
    return beta1 * m.to(g.dtype) + (1 - beta1) * g, beta2 * v.to(g.dtype) + (1 - beta2) * g.square()


def _written(out: Sequence[torch.Tensor], *values: torch.Tensor) -> _Three:
    """``out``, changed."""
    var, m, v = (place.copy_(value) for place, value in zip(out, values, strict=True))
    return var, m, v


def _state() -> list[torch.Tensor]:
    return [torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4)]


def _example() -> Call:
    return call(0.9, 0.99, 0.1, 0.9, 0.99, 1e-6, torch.randn(3, 4), None, None, out=_state())


@Operator(
    name="npu::npu_apply_adam.out",
    source="CANN operator documentation, aclnnApplyAdam",
    dtypes=_DTYPES,
    writes=("out",),
    examples=(_example,),
)
def npu_apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
    *,
    out: Sequence[torch.Tensor],
) -> _Three:
    """``out``, which is (var, m, v), changed; all of the shape of ``grad``."""
    g = grad.to(compute_dtype(grad))
    m, v = _moments(g, out[1], out[2], beta1, beta2)
    first, second = (
        1 - torch.tensor(power, dtype=torch.float64, device=g.device) for power in (beta1_power, beta2_power)
    )
    step = lr * second.sqrt() / first  # a power of 1 makes it infinite, as on the device
    towards = beta1 * m + (1 - beta1) * g if use_nesterov else m
    return _written(out, out[0].to(g.dtype) - step * towards / (v.sqrt() + epsilon), m, v)


@Operator(
    name="npu::npu_apply_adam_w.out",
    source="CANN operator documentation, aclnnApplyAdamW; op-plugin, test/test_base_ops/test_apply_adam_w.py",
    dtypes=(*_DTYPES, torch.bfloat16),
    writes=("out",),
    examples=(lambda: call(0.9, 0.99, 0.1, 0.01, 0.9, 0.99, 1e-6, torch.randn(3, 4), None, None, None, out=_state()),),
)
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[torch.Tensor],
) -> _Three:
    """``out``, which is (var, m, v), changed; all of the shape of ``grad``. With amsgrad ``max_grad_norm`` is changed too."""
    g = grad.to(compute_dtype(grad))
    m, v = _moments(-g if maximize else g, out[1], out[2], beta1, beta2)
    largest = v
    if amsgrad:
        if max_grad_norm is None:
            raise ValueError("npu_apply_adam_w: with amsgrad it needs max_grad_norm, the largest v so far; pass it.")
        largest = torch.maximum(max_grad_norm.to(g.dtype), v)
        max_grad_norm.copy_(largest)
    powers = (beta1_power * beta1, beta2_power * beta2)
    first, second = (1 - torch.tensor(power, dtype=torch.float64, device=g.device) for power in powers)
    root = (largest / second).sqrt() + epsilon
    kept = out[0].to(g.dtype) * (1 - lr * weight_decay)
    return _written(out, kept - lr * m / first / root, m, v)


@Operator(
    name="npu::npu_bert_apply_adam.out",
    source="operator documentation of torch_npu.npu_bert_apply_adam; CANN, ops-nn, optim/apply_adam_v2",
    covers={"adam_mode": (0, 1)},
    dtypes=_DTYPES,
    writes=("out",),
    examples=(lambda: call(0.1, 0.9, 0.99, 1e-6, torch.randn(3, 4), 1.0, 2.0, 0.01, out=_state()),),
)
def npu_bert_apply_adam(
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: float,
    global_grad_norm: float,
    weight_decay: float,
    step_size: float | None = None,
    adam_mode: int = 0,
    *,
    out: Sequence[torch.Tensor],
) -> _Three:
    """``out``, which is (var, m, v), changed; all of the shape of ``grad``."""
    if step_size is not None and adam_mode == 0:
        raise unsupported("npu_bert_apply_adam", "step_size", step_size, "None with adam_mode 0")
    g = grad.to(compute_dtype(grad))
    if adam_mode == 0 and max_grad_norm > 0 and global_grad_norm > max_grad_norm:
        g = g / (global_grad_norm / max_grad_norm)
    m, v = _moments(g, out[1], out[2], beta1, beta2)
    var = out[0].to(g.dtype)
    step = lr if step_size is None else step_size
    return _written(out, var - step * m / (v.sqrt() + epsilon) - lr * weight_decay * var, m, v)
