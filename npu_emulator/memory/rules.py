"""Operators that do not read all of their arguments; without these rules the check would report false faults.

ATen operators that only move elements have exact rules (`kernels/moves.py`).
"""

from __future__ import annotations

from functools import cache

__all__ = ["may_skip_reads", "overwrites_in_part", "reads_shapes_only"]

_OVERWRITE_IN_PART = ("scatter", "cache", "mla_prolog")
"""In-place operators that write some elements of a cache and keep the rest; the whole cache then counts as written."""
_SKIP_READS = ("attention", "grouped_matmul", "lightning_indexer")
"""Families of operators whose other arguments say which elements are read; the check reports them only if no byte was written."""
_SKIPPING = frozenset(
    {
        "_gather_sparse_backward", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "npu_batch_gather_matmul",
        "npu_batch_gather_matmul_", "npu_gather_pa_kv_cache", "npu_gather_pa_kv_cache_functional",
        "npu_gather_sparse_index", "npu_indexing",
    }
)  # fmt: skip
"""Single operators of this kind. Those that read whole rows of a table have exact rules (`kernels/row_reads.py`)."""
_KNOWN = frozenset(["_c10d_functional", "aten", "atb", "c10d", "npu"])
"""The namespaces of operators that read all of their other arguments. A program's own may read a part, as attention does."""


def _operator(name: str) -> str:
    """Return `add_` of `aten.add_.Tensor`."""
    return name.split(".")[1] if "." in name else name


@cache
def overwrites_in_part(name: str) -> bool:
    """Tell whether an in-place operator keeps some elements of its output."""
    return any(part in _operator(name) for part in _OVERWRITE_IN_PART)


@cache
def may_skip_reads(name: str) -> bool:
    """Tell whether an operator may skip parts of its inputs."""
    namespace, *rest = name.split(".")
    operator = _operator(name)
    skips = operator in _SKIPPING or any(part in operator for part in _SKIP_READS)
    return skips or (bool(rest) and namespace not in _KNOWN)


@cache
def reads_shapes_only(name: str) -> bool:
    """Tell whether an operator makes a tensor like another one (`ones_like`, `new_zeros`) and ignores its values."""
    return _operator(name).endswith("_like") or _operator(name).startswith("new_")
