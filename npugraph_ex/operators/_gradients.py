"""Gradients of a formula by plain autograd, for backward operators whose formula is the forward one's. Holds no operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npugraph_ex.operators._precision import compute_dtype


def gradients(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """The gradients of ``function(*inputs)`` by each floating-point input, unrounded; None where there is none.

    The inputs are widened to float32, or float64 if one of them is, before ``function`` sees them, so it computes as a forward
    formula does. ``grads`` are the gradients by each result; None counts as zero. A result without gradient is left out. An
    input that no result depends on has a gradient of zeros.
    """
    dtype = compute_dtype(*inputs)
    # Kernels also run in inference mode, where nothing is recorded, and where tensors cannot be made leaves.
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaves = [_leaf(value, dtype) for value in inputs]
        results = function(*leaves)
        pairs = [
            (result, grad.to(result.dtype).clone())
            for result, grad in zip(results if isinstance(results, tuple) else (results,), grads, strict=True)
            if grad is not None
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs], wanted, [grad for _, grad in pairs], materialize_grads=True
            )
        )
    return tuple(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)


def _leaf(value: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if value is None:
        return None
    if not value.is_floating_point():
        return value.clone()
    return value.detach().to(dtype, copy=True).requires_grad_()
