"""Gives fake tensors the metadata of seven gradients, such as that of `binary_cross_entropy_with_logits`.

torch_npu differentiates these functions of torch by operators of its own and gives those no meta function, so that no backend
could compile a program that trains with them. The metadata comes from the operators' formulas. As Dynamo may ask for it itself
(`trace_autograd_ops`), `npugraph_ex_autoload` calls `tell` when Dynamo is imported, and each backend of the process gains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="torch_npu's operators for some gradients of torch's functions have no meta function: such a program is not compiled.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_losses.py",
)

NAMES = (
    "npu::npu_binary_cross_entropy_with_logits_backward",
    "npu::kl_div_target_backward",
    "npu::npu_renorm_backward",
    "npu::repeat_interleave_backward_tensor",
    "npu::fft_r2c_backward",
    "npu::fft_c2r_backward",
    "npu::stft_backward",
)
"""The gradients by an input of `binary_cross_entropy_with_logits`, `kl_div` (by the target), `renorm` and so on."""


def tell() -> None:
    """Register a fake function of each operator that is there and has none; done once, before anything is traced."""
    # Not from the package: this may run while the package is being imported, which imports dynamo.
    from npugraph_ex._torch_private.operators import has_meta_kernel

    for name in NAMES:
        operator = getattr(torch.ops.npu, name.removeprefix("npu::"), None)
        if operator is not None and not has_meta_kernel(operator.default):
            torch.library.register_fake(name, partial(_as_the_formula, name))


def _as_the_formula(name: str, *args: Any, **kwargs: Any) -> Any:
    from npugraph_ex.operators import OPERATORS  # takes a while, so only for programs that ask

    return OPERATORS[name].formula(*args, **kwargs)  # type: ignore[misc]
