"""torch's own check of custom operators, on the device: schemas tell what is written and aliased, fake tensors tell shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, call

# The emulator's own operator needs no record: it copies.
EXTRA = {"npu::npu_format_cast": lambda: [call(torch.randn(4, 16).half(), 29)]}
CALLS = {**{name: record.calls for name, record in OPERATORS.items() if record.examples and not record.schema}, **EXTRA}


def on_device(value: Any) -> Any:
    """A tensor's copy on the device; anything else unchanged."""
    return value.npu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck(name: str) -> None:
    """What the schema promises of writes and aliases holds, and fake tensors foretell shapes, strides and dtypes."""
    # torch_npu brings no fake implementation of its format cast.
    checks = ("test_schema",) if name in EXTRA else ("test_schema", "test_faketensor")
    namespace, _, operator = name.partition("::")
    overload = getattr(getattr(torch.ops, namespace), operator).default
    for example in CALLS[name]():
        args, kwargs = pytree.tree_map(on_device, tuple(example))
        outcome = torch.library.opcheck(overload, args, kwargs, test_utils=checks)
        assert outcome == dict.fromkeys(checks, "SUCCESS")


def test_every_operator_that_is_brought_is_checked() -> None:
    """The kernels that packages bring to the device are the ones checked here, of all records with a formula."""
    from npu_emulator import activation

    assert {name for name in activation.registry.offered if name.startswith("npu::")} <= {*CALLS}
    assert {name for name, record in OPERATORS.items() if record.formula and not record.schema} <= {*CALLS}
