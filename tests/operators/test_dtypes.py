"""Every operator in every dtype that its document lists: close to the float64 run of the same formula on the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, Call, Operator, call
from npugraph_ex_conformance.operator_checks import NARROW, dtype_faults, widened

BYTES = {
    "npu::npu_attention_worker_combine",
    "npu::npu_ffn_worker_batching",
    "npu::npu_kv_quant_sparse_flash_attention",
}
"""Operators that read numbers of other dtypes from bytes, which have no float64 form."""
NAMED = {
    *(
        "npu::npu_alloc_float_status",
        "npu::npu_anti_quant",
        "npu::npu_dequant_bias",
        "npu::npu_anti_mx_quant",
        "npu::npu_one_hot",
    ),
    *("npu::npu_dtype_cast", "npu::_npu_dtype_cast", "npu::npu_dtype_cast_backward", "npu::_npu_dtype_cast_backward"),
    *(
        "npu::npu_ffn",
        "npu::npu_grouped_matmul",
        "npu::npu_moe_token_permute_grad_v2",
        "npu::npu_moe_token_unpermute_grad_v2",
    ),
    *("npu::npu_sign_bits_unpack", "npu::npu_fusion_attention_grad_v3", "npu::npu_moe_distribute_dispatch_v2"),
}
"""Operators that have a result whose dtype an argument names, or that is float32 whatever their arguments are."""
UNLISTED = BYTES | {
    "npu::_npu_dropout_gen_mask.Tensor",
    "npu::npu_anti_mx_quant",
    "npu::_npu_rms_norm_backward_quant",
    "npu::npu_weight_quant_preprocess",
    "vllm::qkv_rmsnorm_rope",
}
"""Records without dtypes: those, operators on masks and codes, and one that rounds between its two parts."""
LISTED = [(name, dtype) for name, record in OPERATORS.items() for dtype in record.dtypes if record.formula]


@pytest.mark.parametrize(("name", "dtype"), LISTED, ids=str)
def test_each_dtype_is_close_to_float64(name: str, dtype: torch.dtype) -> None:
    """The formula rounds what it returns and, where the device does, what comes between; it loses nothing else."""
    assert list(dtype_faults(OPERATORS[name], dtype)) == []


LOSING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu of a sum": lambda x, y: torch.nn.functional.gelu(x + y),  # 1 + erf cancels
    "gelu of a double": lambda x, y: torch.nn.functional.gelu(x * 2) + 0 * y,
    "a difference": lambda x, y: (x - y).sigmoid() - 0.5,
    "a steep sine": lambda x, y: (x * 100).sin() + y,
    "a steep softmax": lambda x, y: torch.softmax(x * 30, -1) * y,
}
WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "another formula": lambda x, y: torch.nn.functional.gelu(x + y, approximate="tanh" if x.itemsize == 4 else "none"),
    "a rounded argument": lambda x, y: (x.half().to(x.dtype) if x.itemsize == 4 else x).sin() + y,
    "a steep sine of a rounded argument": lambda x, y: ((x.half().float() if x.itemsize == 4 else x) * 100).sin() + y,
}


@pytest.mark.filterwarnings("ignore:there is no operator")
@pytest.mark.parametrize("what", [*LOSING, *WRONG])
def test_what_rounding_explains_is_no_fault(what: str) -> None:
    """float32 loses digits where values cancel or a function is steep, and no formula can keep them; more than that is a fault."""
    name, examples = f"losing::{what.replace(' ', '_')}", tuple(partial(_of_two, seed) for seed in range(12))
    Operator(name=name, source="by hand", dtypes=(torch.float32,), examples=examples)((LOSING | WRONG)[what])
    assert bool([*dtype_faults(OPERATORS[name], torch.float32)]) == (what in WRONG)


def _of_two(seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    return call(torch.randn(4, 16, generator=generator), torch.randn(16, generator=generator))


def in_float64(formula: Callable[..., Any], example: Call) -> Any:
    """What a formula returns for the example's numbers in float64."""
    wide = copy.deepcopy(widened(example))
    return formula(*wide.args, **wide.kwargs)


@pytest.mark.slow
def test_every_formula_computes_in_float64() -> None:
    """One walk over all records: the numbers of each example in float64 give results in float64."""
    narrow = {
        record.name
        for record in OPERATORS.values()
        if record.formula and record.name not in BYTES
        for example in record.calls()
        for result in pytree.tree_leaves(in_float64(record.formula, example))
        if isinstance(result, torch.Tensor) and result.dtype in NARROW and result.numel()
    }
    assert narrow <= NAMED
    assert not {name for name, record in OPERATORS.items() if record.formula and not record.dtypes} - UNLISTED
