"""Arguments that the device takes in one shape or dtype only: unlike ones are refused at the call, not broadcast or promoted."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from npugraph_ex.operators import OPERATORS, Alike, Operator, RefusedArgumentError

RECORDS = {name: record for name, record in OPERATORS.items() if any(record.alike)}


def _given(record: Operator, argument: str) -> dict[str, Any]:
    """The arguments by name of the first example that has this one, else of the first."""
    assert record.formula is not None
    names = [*inspect.signature(record.formula).parameters]
    calls = [{**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in record.calls()]
    return next((given for given in calls if given.get(argument) is not None), calls[0])


def _unlike(record: Operator, what: str, argument: str, given: dict[str, Any]) -> torch.Tensor:
    """What the device refuses for the argument beside the first of its group; one that the example leaves out is like that one."""
    leader = given[getattr(record.alike, what)[0]]
    if what == "shape":
        return leader[:1] if leader.shape[0] > 1 else torch.cat((leader, leader))
    taken = (leader.dtype, *record.alike.besides.get(argument, ()))
    wrong = next(dtype for dtype in (torch.float32, torch.float16, torch.bfloat16) if dtype not in taken)
    value = given.get(argument)
    return (leader if value is None else value).to(wrong)


WRONG = [
    (name, argument, what)
    for name, record in RECORDS.items()
    for what, arguments in record.alike.groups()
    for argument in arguments[1:]
]


def test_the_norms_of_sums_are_asked() -> None:
    """The first operands of each take one shape."""
    assert {"npu::npu_add_rms_norm", "npu::npu_add_rms_norm_quant", "npu::npu_add_layer_norm"} <= RECORDS.keys()
    sums = [record for name, record in RECORDS.items() if "npu_add_" in name and "backward" not in name]
    assert all(record.alike.shape[:2] == ("x1", "x2") for record in sums)


@pytest.mark.parametrize(("name", "argument", "what"), WRONG, ids=["-".join(case) for case in WRONG])
def test_unlike_arguments_are_refused(name: str, argument: str, what: str) -> None:
    """By the formula, and on the device before anything is launched, in a capture too, which goes on."""
    record = RECORDS[name]
    given = _given(record, argument)
    leader = getattr(record.alike, what)[0]
    wrong = {**given, argument: _unlike(record, what, argument, given)}
    said = rf"{name.partition('::')[2].partition('.')[0]}: {argument} should be of the {what} of {leader}"
    assert record.formula is not None
    with pytest.raises(RefusedArgumentError, match=said):
        record.formula(**wrong)
    record.formula(**given)
    if record.overload is None:  # a client's
        return
    on_device = {key: value.npu() if isinstance(value, torch.Tensor) else value for key, value in wrong.items()}
    launched, graph = torch.zeros(1).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with pytest.raises(RuntimeError, match=said) as caught:
            record.overload(**on_device)
        launched.add_(1)
    assert getattr(caught.value, "code", None) == 161002
    graph.replay()
    assert launched.item() == 1


def test_the_dtypes_besides_are_taken() -> None:
    """The weight of a norm may be float32 beside a float16 row, and not bfloat16; one that the group lacks is refused."""
    x, gamma = torch.randn(2, 16).half().npu(), torch.rand(16).npu()
    y, _ = torch.ops.npu.npu_rms_norm(x, gamma)
    assert torch.equal(y.cpu(), torch.nn.functional.rms_norm(x.cpu().float(), (16,), gamma.cpu(), 1e-6).half())
    with pytest.raises(
        RuntimeError, match=r"of the dtype of input, torch\.float16 or torch\.float32; it is torch\.bfloat16"
    ):
        torch.ops.npu.npu_rms_norm(x, gamma.bfloat16())
    with pytest.raises(Exception, match=r"field alike: .*'y'"):
        Operator(name="npu::none_such", formula=lambda x: x, alike=Alike(dtype=("x",), besides={"y": (torch.float32,)}))


def test_the_groups_of_add_layer_norm() -> None:
    """A float32 term beside one in half precision wants float32 vectors; float16 and bfloat16 do not go together."""
    x, other, vector = (torch.randn(*size).npu() for size in ((3, 16), (3, 16), (16,)))
    y, *_ = torch.ops.npu.npu_add_layer_norm(x.half(), other, vector, vector)
    wanted = torch.nn.functional.layer_norm(x.half().float().cpu() + other.cpu(), (16,), vector.cpu(), vector.cpu())
    torch.testing.assert_close(y.cpu(), wanted)
    half, brain = torch.float16, torch.bfloat16
    for first, second, gamma, beta in (
        (half, brain, half, half),
        (half, torch.float32, half, half),
        (half, half, half, torch.float32),
    ):
        with pytest.raises(RuntimeError, match=r"npu_add_layer_norm: (x2|gamma and beta) should be"):
            torch.ops.npu.npu_add_layer_norm(x.to(first), other.to(second), vector.to(gamma), vector.to(beta))


@pytest.mark.parametrize(
    ("target", "scale", "bias", "token", "said"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, True, None),
        (torch.float16, torch.float32, torch.float16, True, None),
        (torch.float16, torch.float32, torch.int32, False, None),
        (torch.float16, torch.float32, torch.float16, False, "bias should be torch.int32"),
        (torch.float16, torch.bfloat16, torch.int32, True, "scale should be torch.float32"),
        (torch.bfloat16, torch.float32, torch.float16, True, "bias should be"),
        (torch.int8, torch.float32, torch.int32, True, "pertoken_scale should be None"),
        (torch.int32, torch.float32, torch.float32, False, "bias should be torch.int32"),
    ],
)
def test_the_groups_of_quant_matmul(
    target: torch.dtype, scale: torch.dtype, bias: torch.dtype, token: bool, said: str | None
) -> None:
    """Which dtypes of scales and of a bias go with a result, of two int8 matrices."""
    x, w = (torch.randint(-8, 8, size, dtype=torch.int8).npu() for size in ((3, 16), (16, 8)))
    given = {
        "bias": torch.ones(8).to(bias).npu(),
        "output_dtype": target,
        "pertoken_scale": torch.ones(3).npu() if token else None,
    }
    if said is None:
        y = torch.ops.npu.npu_quant_matmul(x, w, torch.ones(8).to(scale).npu(), **given)
        assert torch.equal(y.cpu().double(), (x.cpu().double() @ w.cpu().double() + 1).to(target).double())
        return
    with pytest.raises(RuntimeError, match=said):
        torch.ops.npu.npu_quant_matmul(x, w, torch.ones(8).to(scale).npu(), **given)
