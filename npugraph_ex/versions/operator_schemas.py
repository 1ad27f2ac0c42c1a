"""Operators of torch_npu with other arguments, outputs or meta functions. For tests and for `docs/reference/versions.md`."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch_npu 2.10 lacks operators, or some of their arguments and meta functions, which newer releases have.",
    since=(2, 11),
    test="tests/operators/test_agrees_with_torch_npu.py",
)
OTHER_SCHEMAS = frozenset(
    f"npu::{name}"
    for name in (
        "npu_add_rms_norm_dynamic_quant",
        "npu_dynamic_mx_quant",
        "npu_grouped_dynamic_block_quant",
        "npu_grouped_dynamic_mx_quant",
        "npu_grouped_matmul_swiglu_quant_v2",
        "npu_mhc_post_backward",
        "npu_mhc_pre",
        "npu_mhc_pre_backward",
        "npu_moe_finalize_routing",
        "npu_moe_gating_top_k",
        "npu_quant_max",
        "npu_sparse_flash_attention",
    )
)
OTHER_METAS = frozenset(
    f"npu::{name}"
    for name in (
        "batch_norm_reduce",
        "npu_add_rms_norm_dynamic_quant",
        "npu_grouped_matmul_swiglu_quant_v2",
        "npu_mhc_pre",
        "npu_moe_distribute_dispatch_v2",
        "npu_quant_max",
    )
)
"""The operators of which release 2.10 says something else."""


def others() -> frozenset[str]:
    """The operators of which the installed release says something else; empty on the newer side."""
    return OTHER_SCHEMAS | OTHER_METAS if DIFFERENCE.older else frozenset()
