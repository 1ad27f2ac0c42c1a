"""Examples about the cache of compilations: what was kept for other options or other rules is not used.

One function is compiled and kept twice, in one folder. What differs makes other values: the number in a custom pass, in a
registered rule, in a global value of some kind that a pass reads, or in one that the function itself reads; so a compilation that
is wrongly taken for the other's is seen in the results.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import fx

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.inference import cache_compile

_WRITTEN = 2
"""The number in the function, which passes and rules replace."""


def cache_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. ``seed`` modulo 4 chooses what differs."""
    draw = random.Random(seed)
    values = torch.arange(1, draw.randint(3, 9), dtype=torch.int32).to("npu")
    kind = (_with_options, _with_rule, _with_value_of_a_pass, partial(_with_value_of_the_function, compiled=[]))[
        seed % 4
    ]
    try:
        with TemporaryDirectory() as folder:
            for number in draw.sample(range(3, 20), 2):
                found = kind(number, values, Path(folder))
                if not torch.equal(found, values * number):
                    return f"{found.tolist()} instead of {values.tolist()} times {number}, as what was kept for another number"
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"
    return ""


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, _WRITTEN)


def _with_options(number: int, values: torch.Tensor, folder: Path) -> torch.Tensor:
    return _kept(values, folder, {"post_grad_custom_pre_pass": _multiplying_by(number)})


def _with_rule(number: int, values: torch.Tensor, folder: Path) -> torch.Tensor:
    with _rule(number):
        return _kept(values, folder, {})


_SOURCE = """
import torch

def number():
    held = next(iter(READ.values())) if isinstance(READ, dict) else getattr(READ, "number", READ)
    return int(held if isinstance(held, (int, torch.Tensor)) else held[0])

def multiply(gm, example_inputs, config):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        node.args = (node.args[0], number())
"""
"""A module of the user's: this one is the suite's, whose globals are no part of a key."""


def _with_value_of_a_pass(number: int, values: torch.Tensor, folder: Path) -> torch.Tensor:
    kind = values.numel() % len(_HELD)
    module: dict[str, Any] = {"__name__": "passes_that_read", "READ": _HELD[kind](number)}
    exec(_SOURCE, module)  # noqa: S102 - the text above
    return _kept(values, folder, {"post_grad_custom_pre_pass": module["multiply"]})


def _with_value_of_the_function(
    number: int, values: torch.Tensor, folder: Path, *, compiled: list[Callable[..., torch.Tensor]]
) -> torch.Tensor:
    """The process that compiled calls again, and so does another one."""
    with mock.patch.dict(globals(), _READ=_HELD[values.numel() % 3](number)):
        compiled.append(cache_compile(_multiplied_by_what_it_reads, cache_dir=folder))
        found = [one(values) for one in compiled]
    return found[0] if all(torch.equal(found[0], one) for one in found) else torch.stack(found)


class _Holding:
    def __init__(self, number: int) -> None:
        self.number = number


_READ: Any = None
_HELD: tuple[Callable[[int], object], ...] = (
    lambda number: {"number": number},
    _Holding,
    lambda number: [number],
    lambda number: {torch.ops.aten.mul.Tensor: number},
    torch.tensor,
    lambda number: deque([number]),
    lambda number: bytearray([number]),
)
"""Values that hold a number; a function that is traced can read the first three."""


def _multiplied_by_what_it_reads(x: torch.Tensor) -> torch.Tensor:
    if isinstance(_READ, _Holding):
        return torch.mul(x, _READ.number)
    return torch.mul(x, _READ["number"] if isinstance(_READ, dict) else _READ[0])


def _kept(values: torch.Tensor, folder: Path, options: Mapping[str, object]) -> torch.Tensor:
    """The result of a call as a new process would make it: from the folder, if it holds what fits."""
    torch.compiler.reset()
    result: torch.Tensor = cache_compile(_doubled, options=options, cache_dir=folder)(values)
    return result


def _multiplying_by(number: int) -> Callable[..., None]:
    def replace(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
        del example_inputs, config
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], number)

    return replace


def _rule(number: int) -> AbstractContextManager[object]:
    def multiplied(x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, number)

    return register_replacement(_doubled, multiplied, [torch.ones(4, dtype=torch.int32)])
