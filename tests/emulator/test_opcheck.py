"""torch's own check of custom operators, on the device: schemas tell what is written and aliased, fake tensors tell shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from operator_metas import has_meta
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, call
from npugraph_ex.versions import operator_schemas

# The emulator's own operator needs no record: it copies.
EXTRA = {"npu::npu_format_cast": lambda: [call(torch.randn(4, 16).half(), 29)]}
CALLS = {
    **{
        name: record.calls
        for name, record in OPERATORS.items()
        if record.examples and record.overload and not record.schema and not record.across_ranks
    },
    **EXTRA,
}
UNDECLARED = [name for name, record in OPERATORS.items() if record.formula and record.overload and record.writes]


UNTRUE = {
    # On the device the second result of the one that both run is an argument, which its schema does not say.
    "npu::npu_moe_token_unpermute": "test_schema",
    "npu::_npu_moe_token_unpermute": "test_schema",
    # The meta function returns a new tensor; the schema says, and the device does, that it is the argument.
    "npu::npu_sim_exponential_": "test_faketensor",
    # The device gives the results of a quantisation that is not wanted one element, the meta function none.
    "npu::npu_add_rms_norm_dynamic_quant": "test_faketensor",
    # Torch's check compares the arguments, which the CPU cannot do with 8-bit floating ones.
    "npu::npu_transpose_quant_batchmatmul": "test_schema",
    "npu::npu_anti_mx_quant": "test_schema",
    "npu::npu_add_quant_matmul": "test_schema",
    "npu::npu_add_quant_matmul_": "test_schema",
}
"""The check that an operator fails by torch_npu's registration of it, or by torch's limits."""
OTHERWISE = operator_schemas.others()


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
    fake = has_meta(overload_of(name))
    honest = name not in OPERATORS or not OPERATORS[name].writes
    checks = (*(("test_schema",) if honest else ()), *(("test_faketensor",) if fake else ()))
    return tuple(check for check in checks if check != UNTRUE.get(name))


@pytest.mark.parametrize("name", [name for name in CALLS if name not in UNDECLARED and name not in OTHERWISE])
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


def differs(one: Any, other: Any) -> bool:
    """Whether a tensor of one differs from its twin in the other."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return any(isinstance(left, torch.Tensor) and not torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_writes_are_those_of_the_record(name: str) -> None:
    """Where a schema is silent: the arguments that change are those of the record, and so are the results that they are."""
    overload, record = overload_of(name), OPERATORS[name]
    names = [argument.name for argument in overload._schema.arguments]
    for example in record.calls():
        args, kwargs = pytree.tree_map(on_device, tuple(example))
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        before = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        results = pytree.tree_leaves(overload(*args, **kwargs))
        changed = {key for key, value in before.items() if differs(given[key], value)}
        assert changed == {*record.writes}
        for position, written in zip(record.returns_written, record.writes, strict=False):
            assert results[position] is given[written]


@pytest.mark.skipif(operator_schemas.DIFFERENCE.older, reason=operator_schemas.DIFFERENCE.what)
def test_every_operator_that_is_brought_is_checked() -> None:
    """The kernels that packages bring to the device are the ones checked here, of all records with a formula."""
    from npu_emulator import activation

    over_ranks = {name for name, record in OPERATORS.items() if record.across_ranks}  # test_fused_collectives has those
    checked = {*CALLS} | over_ranks
    assert {name for name in activation.registry.offered if name.startswith("npu::")} <= checked
    assert {
        name for name, record in OPERATORS.items() if record.formula and record.overload and not record.schema
    } <= checked
