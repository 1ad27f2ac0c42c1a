"""Arguments that the device takes in one shape or dtype only: unlike ones are refused at the call, not broadcast or promoted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, Alike, Operator, RefusedArgumentError

RECORDS = {name: record for name, record in OPERATORS.items() if any(record.alike)}


def _given(record: Operator) -> dict[str, Any]:
    """The first example's arguments by name."""
    assert record.formula is not None
    args, kwargs = record.calls()[0]
    return {**dict(zip(inspect.signature(record.formula).parameters, args, strict=False)), **kwargs}


def _other_dtype(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32 if value.dtype != torch.float32 else torch.float16)


WRONG = [
    (name, argument, what)
    for name, record in RECORDS.items()
    for what, arguments in record.alike._asdict().items()
    for argument in arguments[1:]
]


def test_the_norms_of_sums_are_asked() -> None:
    """The first operands of each take one shape."""
    assert {"npu::npu_add_rms_norm", "npu::npu_add_rms_norm_quant", "npu::npu_add_layer_norm"} <= RECORDS.keys()
    assert all(record.alike.shape == ("x1", "x2") for name, record in RECORDS.items() if "add_" in name)


@pytest.mark.parametrize(("name", "argument", "what"), WRONG, ids=["-".join(case) for case in WRONG])
def test_unlike_arguments_are_refused(name: str, argument: str, what: str) -> None:
    """By the formula, and on the device before anything is launched, in a capture too, which goes on."""
    record = RECORDS[name]
    given = _given(record)
    value = given.get(argument, given["gamma"])  # an optional vector that the example leaves out is like gamma
    wrong = {**given, argument: value[:1] if what == "shape" else _other_dtype(value)}
    said = rf"{name.partition('::')[2]}: {argument} should be of the {what} of {getattr(record.alike, what)[0]}"
    assert record.formula is not None
    with pytest.raises(RefusedArgumentError, match=said):
        record.formula(**wrong)
    record.formula(**given)
    if record.overload is None:  # a client's
        return
    on_device, right = (
        {key: v.npu() if isinstance(v, torch.Tensor) else v for key, v in one.items()} for one in (wrong, given)
    )
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with pytest.raises(RuntimeError, match=said) as caught:
            record.overload(**on_device)
        record.overload(**right)
    assert getattr(caught.value, "code", None) == 161002
    graph.replay()
    torch.npu.synchronize()


def test_a_name_that_is_no_argument_is_refused() -> None:
    """As in the other fields of a record."""
    with pytest.raises(Exception, match=r"field alike: .*'z'"):
        Operator(name="npu::none_such", formula=lambda x: x, alike=Alike(shape=("x", "z")))
