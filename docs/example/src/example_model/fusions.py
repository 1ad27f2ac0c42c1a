"""The project's own fusions; a pre-commit hook validates them."""

from __future__ import annotations

import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

import npugraph_ex


def search(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An addition and a norm of the sum."""
    added = torch.add(x1, x2)
    y, _ = torch_npu.npu_rms_norm(added, gamma)
    return y, added


def replace(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both by one operator."""
    y, _, added = torch_npu.npu_add_rms_norm(x1, x2, gamma)
    return y, added


with FakeTensorMode():
    x = torch.empty(2, 64, dtype=torch.float16, device="npu")
    gamma = torch.empty(64, dtype=torch.float16, device="npu")
    npugraph_ex.register_replacement(search, replace, example_inputs=[x, x, gamma])
