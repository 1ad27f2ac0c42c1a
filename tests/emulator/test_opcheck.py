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
CALLS = {
    **{
        name: record.calls
        for name, record in OPERATORS.items()
        if record.examples and record.overload and not record.schema
    },
    **EXTRA,
}


RETURNING_ARGUMENTS = {"npu::npu_moe_token_unpermute", "npu::_npu_moe_token_unpermute"}
"""On the device the second result of the one that both run is an argument; its schema does not say so."""


def on_device(value: Any) -> Any:
    """A tensor's copy on the device; anything else unchanged."""
    return value.npu() if isinstance(value, torch.Tensor) else value


def overload_of(name: str) -> torch._ops.OpOverload:
    """The operator of that name."""
    if name in OPERATORS:
        return OPERATORS[name].overload
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator).default


def possible_checks(name: str) -> tuple[str, ...]:
    """All but those that torch_npu's own registration fails: no fake implementation; a schema that hides a write or an alias."""
    fake = torch._C._dispatch_has_kernel_for_dispatch_key(overload_of(name).name(), "Meta")
    honest = name not in RETURNING_ARGUMENTS and (name not in OPERATORS or not OPERATORS[name].writes)
    return (*(("test_schema",) if honest else ()), *(("test_faketensor",) if fake else ()))


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck(name: str) -> None:
    """What the schema promises of writes and aliases holds, and fake tensors foretell shapes, strides and dtypes."""
    overload, checks = overload_of(name), possible_checks(name)
    on_host = OPERATORS[name].host_arguments if name in OPERATORS else ()
    places = [argument.name for argument in overload._schema.arguments]
    for example in CALLS[name]():
        args = tuple(
            value if places[place] in on_host else pytree.tree_map(on_device, value)
            for place, value in enumerate(example.args)
        )
        kwargs = {
            name: value if name in on_host else pytree.tree_map(on_device, value)
            for name, value in example.kwargs.items()
        }
        outcome = torch.library.opcheck(overload, args, kwargs, test_utils=checks)
        assert outcome == dict.fromkeys(checks, "SUCCESS")


def test_every_operator_that_is_brought_is_checked() -> None:
    """The kernels that packages bring to the device are the ones checked here, of all records with a formula."""
    from npu_emulator import activation

    assert {name for name in activation.registry.offered if name.startswith("npu::")} <= {*CALLS}
    assert {name for name, record in OPERATORS.items() if record.formula and record.overload and not record.schema} <= {
        *CALLS
    }
