"""What `cache_compile` cannot keep runs as everything else does, and one line says why it is not kept."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D102, D103

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npugraph_ex.inference import cache_compile
from npugraph_ex.versions import ahead_of_time

LOCAL = "it's defined in local scope"


def local_classes() -> tuple[type, type, type]:
    class Plain:
        factor = 3.0

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.full((3,), 3.0, device="npu"))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    @dataclasses.dataclass
    class Fields:
        factor: float

    return Plain, Module, Fields


PLAIN, MODULE, FIELDS = local_classes()


class WithLock:
    """Pickle refuses locks."""

    def __init__(self) -> None:
        self.factor = 2.0
        self.lock = threading.Lock()


class Refusing:
    """An object that says itself that it is not to be pickled, by an error of its own over two lines."""

    factor = 2.0

    def __reduce__(self) -> Any:
        raise ArithmeticError("not\nme")


class Called:
    """An object that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


def scaled(x: Tensor, thing: Any) -> Tensor:
    return x * thing.factor


def applied(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x)


def in_a_list(x: Tensor, things: list[Any]) -> Tensor:
    return x * things[0].factor


def closing_over(thing: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * thing.factor


def closing_over_no_value() -> Callable[[Tensor], Tensor]:
    """The variable gets its value after the call, or never."""

    def function(x: Tensor) -> Tensor:
        return later(x) if x.dim() > 1 else x * 2

    if not closing_over_no_value:

        def later(x: Tensor) -> Tensor:
            return x

    return function


def on_a_stream(x: Tensor) -> Tensor:
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        result = x * 2
    torch.npu.current_stream().wait_stream(stream)
    return result


def without_tensors(x: Tensor) -> int:
    return x.dim() + 3


OF_A_LOCAL_CLASS = "what kind is decides" if ahead_of_time.DIFFERENCE.older else "local object"

# The function, what it takes besides a tensor, and what the line says of it.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "instance of a local class": (scaled, (PLAIN(),), LOCAL),
    "local dataclass": (scaled, (FIELDS(2.0),), LOCAL),
    "in a list": (in_a_list, ([PLAIN()],), LOCAL),
    "local module": (applied, (MODULE(),), LOCAL),
    "method of a local module": (MODULE().forward, (), LOCAL),
    "closure": (closing_over(PLAIN()), (), LOCAL),
    "closure without a value": (closing_over_no_value(), (), "it closes over 'later', which has no value"),
    "lambda": (applied, (lambda x: x + 1,), "what function is decides"),
    "partial": (applied, (functools.partial(torch.add, other=2),), "what function.func is decides"),
    "object that is called": (applied, (Called(),), "what type(function).__call__ is decides"),
    "class": (lambda x, kind: x * kind.factor, (Refusing,), "what kind is decides"),
    "local class": (lambda x, kind: x * kind.factor, (PLAIN,), OF_A_LOCAL_CLASS),
    "lock": (scaled, (WithLock(),), "cannot pickle '_thread.lock' object"),
    "own error": (scaled, (Refusing(),), "not me"),
    "streams": (on_a_stream, (), "it uses streams or events that are objects of this process"),
    "no graph": (without_tensors, (), "it computes nothing with tensors"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs_and_one_line_says_why_it_is_not_kept(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values are those of eager mode at each call, no file is left, and there is one line with the reason."""
    function, further, reason = CASES[name]
    torch.compiler.reset()
    compiled = cache_compile(function, cache_dir=tmp_path)
    with caplog.at_level(logging.WARNING, logger="npugraph_ex"):
        for value in (1.0, 2.0):
            x = torch.full((3,), value, device="npu")
            wanted = function(x, *further)
            assert torch.equal(torch.as_tensor(compiled(x, *further)).cpu(), torch.as_tensor(wanted).cpu())
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("npugraph_ex")]
    line, address = message.splitlines()
    assert address == "help: npugraph-ex help SavedGraphError"
    assert reason in line
    assert "in every process" in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class OwnMethod(torch.nn.Module):
    """Calls a method that somebody puts on the instance."""

    shift: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(x) * 2


def test_a_method_of_an_instance_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the attribute and by its line, instead of the name that pickle looked for in the class."""
    model = OwnMethod()
    model.shift = types.MethodType(lambda _, x: x + 50, model)
    compiled = cache_compile(model.forward, cache_dir=tmp_path)
    for value in (1.0, 2.0):
        assert compiled(torch.full((3,), value, device="npu")).tolist() == [(value + 50) * 2] * 3
    (line, _) = caplog.messages[0].splitlines()
    assert len(caplog.messages) == 1
    assert re.search(r"shift \(<lambda>, .*test_unsaveable\.py:\d+\) is a method of one OwnMethod only", line)
    assert line.endswith("define it in the class, as OwnMethod.shift")


ARRAY = np.ones(3, dtype=np.float32)


def plus_a_global_array(x: Tensor) -> Tensor:
    return x + torch.from_numpy(ARRAY).to(x.device)


def plus_an_array(x: Tensor, array: Any) -> Tensor:
    return x + torch.from_numpy(array).to(x.device)


@pytest.mark.parametrize("name", ["ARRAY", "array"])
def test_an_array_of_numpy_is_read_at_each_call(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in place or replaced, its values are those of the call; one warning names it, and nothing is kept."""
    function: Any = plus_a_global_array if name == "ARRAY" else plus_an_array
    compiled = cache_compile(function, cache_dir=tmp_path)
    first, second = (np.full(3, value, dtype=np.float32) for value in (1, 7))
    x = torch.ones(3, device="npu")
    for array, value in ((first, 1.0), (first, 4.0), (second, 7.0), (second, 9.0)):
        array[:] = value
        monkeypatch.setitem(globals(), "ARRAY", array)
        found = compiled(x) if name == "ARRAY" else compiled(x, array)
        assert found.tolist() == [1 + value] * 3
    (said,) = [one for one in caplog.messages if "in every process" in one]
    assert f"it reads the NumPy array {name}; make it a tensor" in said
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_compiled_raises_its_own_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A graph break is no matter of keeping: torch's error comes, and no line about saving."""

    def breaking(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with caplog.at_level(logging.WARNING, logger="npugraph_ex"), pytest.raises(torch._dynamo.exc.Unsupported):
        cache_compile(breaking, cache_dir=tmp_path)(torch.ones(3, device="npu"))
    assert not [record for record in caplog.records if "every process" in record.getMessage()]
