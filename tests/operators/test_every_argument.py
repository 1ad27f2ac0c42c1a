"""Every argument of every operator on the device: a value that means nothing is refused by name, or changes the results."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch.utils import _pytree as pytree

from npugraph_ex.operators import OPERATORS, Call, Operator
from npugraph_ex.testing.operator_checks import on_device

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


def outcome(record: Operator, example: Call) -> list[torch.Tensor]:
    """What the call returns, and leaves in its arguments, with the same random numbers each time."""
    torch.npu.manual_seed(0)
    args, kwargs = on_device(record, Call(*copy.deepcopy(tuple(example))))
    results = record.overload(*args, **kwargs)
    leaves = pytree.tree_leaves((results, args, kwargs))
    return [
        leaf.cpu().reshape(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two calls gave the same bytes."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


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


def test_no_argument_is_taken_in_silence() -> None:
    """One walk over all records; each error names the argument, and says what is covered or has the device's code."""
    found = {
        name: faults
        for name, record in OPERATORS.items()
        if record.formula and record.overload and not record.schema and not record.across_ranks
        if (faults := list(silences(record)))
    }
    assert not found, "\n".join(f"{name}: {fault}" for name, faults in found.items() for fault in faults)
