"""Every operator in every dtype that its document lists: close to the float64 run of the same formula on the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu

from npugraph_ex.operators import OPERATORS
from npugraph_ex.testing.operator_checks import dtype_faults

LISTED = [(name, dtype) for name, record in OPERATORS.items() for dtype in record.dtypes if record.formula]


@pytest.mark.parametrize(("name", "dtype"), LISTED, ids=str)
def test_each_dtype_is_close_to_float64(name: str, dtype: torch.dtype) -> None:
    """The formula rounds what it returns and, where the device does, what comes between; it loses nothing else."""
    assert list(dtype_faults(OPERATORS[name], dtype)) == []
