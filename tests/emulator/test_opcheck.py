"""torch's own check of custom operators, on the device: schemas tell what is written and aliased, fake tensors tell shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu

from npugraph_ex.operators import KERNELS

Call = tuple[tuple[Any, ...], dict[str, Any]]


def half(*size: int) -> torch.Tensor:
    """Return normal float16 numbers on the device."""
    return torch.randn(*size).half().npu()


def full(*size: int) -> torch.Tensor:
    """Return normal float32 numbers on the device."""
    return torch.randn(*size).npu()


def whole(*size: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return small whole numbers on the device."""
    return torch.randint(-8, 8, size).to(dtype).npu()


def scale(*size: int) -> torch.Tensor:
    """Return positive float32 numbers on the device."""
    return (torch.rand(*size) + 0.5).npu()


def rotation(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of angles."""
    angle = torch.rand(*size)
    return angle.cos().half().npu(), angle.sin().half().npu()


def attention(version: int) -> Call:
    """Return the arguments of inference attention over a cache of two sequences."""
    names = ("num_heads", "actual_seq_lengths_kv") if version == 1 else ("num_query_heads", "actual_seq_kvlen")
    return (half(2, 1, 16), half(2, 6, 16), half(2, 6, 16)), {"input_layout": "BSH", names[0]: 2, names[1]: [5, 3]}


def training(*, backward: bool) -> Call:
    """Return the arguments of attention in training, or of its gradients."""
    query, key, value = (half(2, 2, 4, 16) for _ in range(3))
    if not backward:
        return (query, key, value, 2, "BNSD"), {}
    _, largest, total, _, seed, offset = torch.ops.npu.npu_fusion_attention_v3(query, key, value, 2, "BNSD")
    given = {"softmax_max": largest, "softmax_sum": total, "attention_in": half(2, 2, 4, 16)}
    return (query, key, value, half(2, 2, 4, 16), 2, "BNSD"), {**given, "seed": seed, "offset": offset}


CALLS: dict[str, Callable[[], Call]] = {
    "npu_rms_norm": lambda: ((half(3, 16), half(16)), {}),
    "npu_rms_norm_backward": lambda: ((half(3, 16), half(3, 16), half(16), scale(3, 1)), {}),
    "npu_add_rms_norm": lambda: ((half(3, 16), half(3, 16), half(16)), {}),
    "npu_add_rms_norm_cast": lambda: ((half(3, 16), half(3, 16), half(16)), {}),
    "npu_add_rms_norm_dynamic_quant": lambda: ((half(3, 16), half(3, 16), half(16)), {"output_mask": [True, False]}),
    "npu_add_rms_norm_quant": lambda: ((half(3, 16), half(3, 16), half(16), scale(16), None), {}),
    "npu_dynamic_quant": lambda: ((half(3, 16),), {}),
    "npu_quantize": lambda: ((full(3, 16), scale(16), None, torch.qint8, -1, False), {}),
    "npu_transpose_batchmatmul": lambda: (
        (half(3, 2, 16), half(2, 16, 8)),
        {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]},
    ),
    "npu_quant_matmul": lambda: ((whole(3, 16), whole(16, 8), scale(8)), {"output_dtype": torch.bfloat16}),
    "npu_swiglu": lambda: ((half(3, 16),), {}),
    "npu_rotary_mul": lambda: ((half(2, 3, 4, 16), *rotation(1, 3, 1, 16)), {}),
    "npu_fused_infer_attention_score": lambda: attention(1),
    "npu_fused_infer_attention_score_v2": lambda: attention(2),
    "npu_scatter_nd_update": lambda: ((full(4, 3), torch.tensor([[2], [0]]).npu(), full(2, 3)), {}),
    "npu_scatter_nd_update_": lambda: ((full(4, 3), torch.tensor([[2], [0]]).npu(), full(2, 3)), {}),
    "npu_swiglu_quant": lambda: ((half(3, 16),), {"activate_left": True, "quant_mode": 1}),
    "npu_fusion_attention_v3": lambda: training(backward=False),
    "npu_fusion_attention_grad_v3": lambda: training(backward=True),
    "_npu_dtype_cast": lambda: ((full(3, 4), torch.float16), {}),
    "npu_dtype_cast": lambda: ((full(3, 4), torch.float16), {}),
    "npu_format_cast": lambda: ((half(4, 16), 29), {}),
    "npu_moe_gating_top_k_softmax": lambda: ((half(4, 8),), {"k": 2}),
    "npu_grouped_matmul": lambda: (
        ([half(4, 8)], [half(2, 8, 5)]),
        {"group_list": torch.tensor([1, 4]).npu(), "group_type": 0, "split_item": 3},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck(name: str) -> None:
    """What the schema promises of writes and aliases holds, and fake tensors foretell shapes, strides and dtypes."""
    args, kwargs = CALLS[name]()
    # torch_npu brings no fake implementation of its format cast.
    checks = ("test_schema",) if name == "npu_format_cast" else ("test_schema", "test_faketensor")
    operator = getattr(torch.ops.npu, name).default
    outcome = torch.library.opcheck(operator, args, kwargs, test_utils=checks)
    assert outcome == dict.fromkeys(checks, "SUCCESS")


def test_every_operator_of_the_list_is_checked() -> None:
    """The kernels that are brought to the device are the ones checked here, as are the references."""
    from npu_emulator.kernels.registry import installed_kernels

    brought = {name.removeprefix("npu::") for name in installed_kernels()}
    assert brought <= CALLS.keys()
    assert {name.removeprefix("npu::") for name in KERNELS if name.startswith("npu::")} <= CALLS.keys()
