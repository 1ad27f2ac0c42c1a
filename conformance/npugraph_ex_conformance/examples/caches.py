"""Examples about the cache of compilations: what was kept for other options or other rules is not used.

One function is compiled and kept twice, in one folder. What differs makes other values: the number in a custom pass, or in a
registered rule; so a compilation that is wrongly taken for the other's is seen in the results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import fx

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.inference import cache_compile

_WRITTEN = 2
"""The number in the function, which passes and rules replace."""


def cache_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. ``seed`` modulo 2 chooses what differs."""
    draw = random.Random(seed)
    values = torch.arange(1, draw.randint(3, 9), dtype=torch.int32).to("npu")
    kind = (_with_options, _with_rule)[seed % 2]
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
