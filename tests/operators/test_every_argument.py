"""Every argument of every operator on the device: a value that means nothing is refused by name, or changes the results."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, Call, Operator, RefusedArgumentError, UnsupportedArgumentError
from npugraph_ex.versions import operator_schemas
from npugraph_ex_conformance.operator_checks import on_device

MEANINGLESS = {
    "str": "nonsense",
    "Optional[str]": "nonsense",
    "int": -987,
    "Optional[int]": -987,
    "Optional[Tensor]": torch.full((1,), 3.0),
    "Optional[List[Tensor]]": [torch.full((1,), 3.0)],
}
"""A value of each kind of argument that no operator's document lists. Optional tensors are tried where examples give none."""
WITHOUT_EFFECT = {
    "seed": "is read where there is dropout",
    "offset": "is read where there is dropout",
    "numels": "is read where there is dropout",
    "pre_tockens": "is read in the banded sparse modes",
    "next_tockens": "is read in the banded sparse modes",
    "pre_tokens": "is read in the banded sparse modes",
    "next_tokens": "is read in the banded sparse modes",
    "block_size": "is read where there is a block table",
    "max_query_len": "a hint of the tiling",
    "run_mode": "without effect, as the document says",
    "activation": "without effect, as the document says",
    "pad_slot_id": "is compared with the slots of the call",
    "top_k_guess": "a guess that makes sampling faster",
    "inner_k_tiles": "reserved, as the document says",
    "tokens_dtype": "the tokens move as they are",
    "begin_mask": "bits of dimensions that the input does not have",
    "end_mask": "bits of dimensions that the input does not have",
    "active_num": "is read where experts have no capacity, and bounds what is valid",
    "expert_capacity": "is read where experts drop",
    "max_output_size": "bounds how many are selected",
    "output_dtype": "is read where the result is quantised",
    "dst_type": "the quantised modes of the example have one",
    "group_mode": "is read where there are groups",
}
"""Arguments that may take any number in an example's call without a change of its results."""


def changed(example: Call, names: list[str], place: int, value: Any) -> Call:
    """The call with another value of one argument."""
    args, kwargs = list(example.args), dict(example.kwargs)
    if place < len(args):
        args[place] = value
    else:
        kwargs[names[place]] = value
    return Call(tuple(args), kwargs)


def outcome(
    record: Operator, example: Call, lay: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> list[torch.Tensor]:
    """What the call returns, and leaves in its arguments, with the same random numbers each time; ``lay`` lays tensors out."""
    torch.npu.manual_seed(0)
    args, kwargs = on_device(record, Call(*copy.deepcopy(tuple(example))))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: lay(t) if t.is_npu else t, (args, kwargs))
    results = record.overload(*args, **kwargs)
    return [leaf.cpu() for leaf in pytree.tree_leaves((results, args, kwargs)) if isinstance(leaf, torch.Tensor)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two calls gave the same: bytes and whole numbers equal, floats but for how vector units sum."""

    def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            return False
        if left.is_floating_point() and left.itemsize > 1:
            return torch.allclose(left.double(), right.double(), rtol=1e-5, atol=1e-7, equal_nan=True)
        return (
            torch.equal(left, right)
            if left.itemsize > 1
            else torch.equal(*(x.contiguous().view(torch.uint8) for x in (left, right)))
        )

    return len(one) == len(other) and all(map(equal, one, other))


def noticed(record: Operator, name: str, call: Call, usual: list[torch.Tensor]) -> Iterator[str]:
    """How the operator notices the value: an empty text, or what is wrong with its error; nothing if it does not."""
    try:
        if not same(usual, outcome(record, call)):
            yield ""
    except RuntimeError as error:
        clear = (
            "; it covers " in str(error) or hasattr(error, "code") or " ERR0100" in str(error)
        )  # op-plugin's own check
        yield "" if clear and name in str(error) else f"{type(error).__name__}: {error}"


def silences(record: Operator) -> Iterator[str]:
    """The arguments of which the operator takes a meaningless value in silence, and errors that are not the device's."""
    names = [argument.name for argument in record.overload._schema.arguments]
    examples = [(example, outcome(record, example)) for example in record.calls()]
    for place, argument in enumerate(record.overload._schema.arguments):
        value = MEANINGLESS.get(str(argument.type))
        found: list[str] = []
        for example, usual in examples:
            given = example.args[place] if place < len(example.args) else example.kwargs.get(argument.name)
            if value is None or found or ("Tensor" in str(argument.type) and given is not None):
                break
            found += noticed(record, argument.name, changed(example, names, place, value), usual)
        else:
            if not found and argument.name not in WITHOUT_EFFECT:
                yield f"{argument.name} is ignored"
        yield from (f"{argument.name}={value}: {fault}" for fault in found if fault)


ON_DEVICE = [
    record
    for record in OPERATORS.values()
    if record.formula and record.overload and not record.schema and not record.across_ranks
    if record.name not in operator_schemas.others()
]


@pytest.mark.slow
def test_no_argument_is_taken_in_silence() -> None:
    """One walk over all records; each error names the argument, and says what is covered or has the device's code."""
    found = [f"{record.name}: {fault}" for record in ON_DEVICE for fault in silences(record)]
    assert not found, "\n".join(found)


OF_MEMORY = {"npu::npu_stride_copy", "npu::npu_weight_quant_preprocess", "npu::npu_add_rms_norm_dynamic_quant"}
"""Operators that read a tensor as it lies in memory; the last one leaves results that are not wanted unwritten."""


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, with another one behind each in memory."""
    return torch.stack((tensor, torch.zeros_like(tensor)), -1)[..., 0] if tensor.numel() and tensor.dim() else tensor


@pytest.mark.slow
def test_strides_change_no_value() -> None:
    """One walk over all records: tensors whose elements do not lie side by side give the same results."""
    wrong = [
        record.name
        for record in ON_DEVICE
        if record.name not in OF_MEMORY
        if not same(outcome(record, record.calls()[0]), outcome(record, record.calls()[0], spread))
    ]
    assert not wrong


def columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, with the first dimension innermost in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor


def announced(record: Operator, example: Call) -> list[torch.Tensor]:
    """The results that torch_npu's fake function announces; none where it has no such function or refuses the call."""
    try:
        with FakeTensorMode() as mode:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: mode.from_tensor(t).to("npu").as_strided(t.shape, t.stride()), tuple(example)
            )
            return pytree.tree_leaves(record.overload(*args, **kwargs))
    except Exception:  # noqa: BLE001 - a fake function that is not there, or refuses, announces nothing
        return []


def unlike(result: object, fake: object) -> bool:
    """Whether the elements lie in columns where rows are announced."""
    if not isinstance(result, torch.Tensor) or not isinstance(fake, torch.Tensor) or result.is_contiguous():
        return False
    strides = [(a, b) for size, a, b in zip(result.shape, result.stride(), fake.stride(), strict=True) if size > 1]
    return result.shape == fake.shape and any(a != b for a, b in strides)


@pytest.mark.slow
def test_results_lie_in_memory_as_torch_npu_announces(caplog: pytest.LogCaptureFixture) -> None:
    """One walk over all records: arguments in columns give results in columns only where the fake function says so."""
    caplog.set_level(logging.CRITICAL)
    wrong = []
    for record in ON_DEVICE:
        for example in record.calls():
            given = Call(*pytree.tree_map_only(torch.Tensor, columns, tuple(example)))
            try:
                results = pytree.tree_leaves(record.formula(*given.args, **given.kwargs))
            except RuntimeError:  # memory in fractals has no columns
                continue
            wrong += [record.name for pair in zip(results, announced(record, given), strict=False) if unlike(*pair)]
    assert not wrong


@pytest.mark.slow
def test_complex_tensors_are_refused() -> None:
    """One walk over all records: where no example and no dtype of the record is complex, the argument is named."""
    taken = []
    for record in ON_DEVICE:
        example, names = record.calls()[0], [argument.name for argument in record.overload._schema.arguments]
        complex_too = any(dtype.is_complex for dtype in record.dtypes)
        for place, value in enumerate(example.args):
            if not isinstance(value, torch.Tensor) or value.is_complex() or complex_too:
                continue
            given = changed(example, names, place, value.to(torch.complex64))
            try:
                record.formula(*given.args, **given.kwargs)
            except (RefusedArgumentError, UnsupportedArgumentError) as error:
                if names[place] in str(error):
                    continue
            taken.append(f"{record.name}: {names[place]}")
    assert not taken
