"""What a cached function reads from outside its arguments may be replaced between two calls: each call has what is there then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from npugraph_ex.inference import cache_compile
from npugraph_ex.report.graphs import graphs_so_far

HERE = sys.modules[__name__]
TENSOR: Any = None
LIST: Any = None
TUPLE: Any = None
MAPPING: Any = None
OBJECT: Any = None
MODULE: Any = None


class Scale(torch.nn.Module):
    """A parameter, a buffer and a plain tensor."""

    plain: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)
        self.register_buffer("shift", value)
        self.plain = value

    def forward(self, x: Tensor) -> Tensor:
        """Use all three."""
        return x * self.weight + self.shift * self.plain


class Owner:
    """A class that holds a tensor."""

    tensor: Tensor


def _in_a_global(name: str, make: Callable[[Tensor], object], read: Callable[[Tensor], Tensor]) -> Any:
    return lambda: (read, lambda value: setattr(HERE, name, make(value)))


def _in_a_closure() -> Any:
    held: Any = None

    def read(x: Tensor) -> Tensor:
        result: Tensor = x + held
        return result

    def replace(value: Tensor) -> None:
        nonlocal held
        held = value

    return read, replace


WAYS: dict[str, Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]]] = {
    "tensor": _in_a_global("TENSOR", lambda value: value, lambda x: x + TENSOR),
    "list": _in_a_global("LIST", lambda value: [value], lambda x: x + LIST[0]),
    "tuple": _in_a_global("TUPLE", lambda value: (value,), lambda x: x + TUPLE[0]),
    "mapping": _in_a_global("MAPPING", lambda value: {"it": value}, lambda x: x + MAPPING["it"]),
    "object": _in_a_global("OBJECT", lambda value: SimpleNamespace(it=value), lambda x: x + OBJECT.it),
    "module": _in_a_global("MODULE", Scale, lambda x: 1 * MODULE(x)),
    "closure": _in_a_closure,
    "class": lambda: (lambda x: x + Owner.tensor, lambda value: setattr(Owner, "tensor", value)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_call_reads_what_is_there(way: str, dynamic: bool, tmp_path: Path) -> None:
    """Also a compilation that was read from its file; a value of the same kind is no reason to compile again."""
    function, replace = WAYS[way]()
    x = torch.arange(3.0, device="npu")
    for made in (1, int(way == "module")):  # torch does not write down a module that is a global
        replace(x + 1)
        before = graphs_so_far()
        compiled = cache_compile(function, cache_dir=tmp_path, dynamic=dynamic)
        for value in (1.0, 5.0, 7.0):
            replace(x + value)
            with torch.no_grad():
                assert torch.equal(compiled(x), function(x)), value
        assert graphs_so_far() - before == made
