"""The layout of a rotary embedding by its meta function."""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="In torch_npu 2.10 the meta function of `npu_rotary_mul` gives its contiguous result the strides of its argument.",
    since=(2, 11),
    test="tests/lifting/test_forms.py",
)


def with_true_layout(operator: torch._ops.OpOverload, results: Any) -> Any:
    """The results of an operator's meta function, laid out as those of the operator."""
    if DIFFERENCE.older and operator.name() == "npu::npu_rotary_mul":
        return torch.empty_like(results, memory_format=torch.contiguous_format)
    return results
