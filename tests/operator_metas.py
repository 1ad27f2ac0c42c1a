"""Which npu operators have a meta function in torch_npu that tests can compare with."""

from __future__ import annotations

import torch

WRONG = {
    "npu::npu_geglu_grad": "gives two tensors where the schema says one",
    "npu::npu_fusion_attention_grad_v2": "asks for a tensor like a list",
    "npu::npu_scatter_list_": "gives tensors where the schema says none",
}
"""Meta functions of torch_npu that cannot be called as the schema says, and why."""


def has_meta(operator: torch._ops.OpOverload) -> bool:
    """Whether torch_npu tells the metadata of the operator's results."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta")
    return registered and operator._schema.name not in WRONG
