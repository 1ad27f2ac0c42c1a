"""Who forgets one wait is told, while the program is compiled, which line to add and where."""

from __future__ import annotations

import inspect
import linecache
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from npugraph_ex import ops, scope
from npugraph_ex.errors import StreamOrderWarning
from npugraph_ex.frontend.entry.explain import Watch

DONE = ops.npu_create_tagged_event("done")


def tagged(x: torch.Tensor) -> torch.Tensor:
    """A record without a wait."""
    with scope.npu_stream_switch("side"):
        y = x * 3
        ops.npu_tagged_event_record(DONE)
    return y + 1  # here


def tagged_without_events(x: torch.Tensor) -> torch.Tensor:
    """Neither."""
    with scope.npu_stream_switch("side"):
        y = x * 3
    return y + 1  # here


def native(x: torch.Tensor) -> torch.Tensor:
    """The wait for the side stream is missing."""
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 3
    return y + 1  # here


def plain(x: torch.Tensor) -> torch.Tensor:
    """For a pass that puts the product on a stream."""
    y = x * 3
    return y + 1  # here


def forgetful(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
    """A pass that records and does not wait."""
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with gm.graph.inserting_before(product):
        gm.graph.call_function(torch.ops.air.scope_enter.default, (["_user_stream_label"], ["side"]))
    with gm.graph.inserting_after(product):
        record = gm.graph.call_function(torch.ops.air.record.default)
    with gm.graph.inserting_after(record):
        gm.graph.call_function(torch.ops.air.scope_exit.default)


@pytest.mark.parametrize(
    ("function", "options", "line"),
    [
        (tagged, {}, "ops.npu_tagged_event_wait(DONE)"),
        (tagged_without_events, {}, "npugraph_ex.ops.npu_tagged_event_wait(event)"),
        (native, {}, "torch.npu.current_stream().wait_event(event)"),
        (plain, {"post_grad_custom_pre_pass": forgetful}, "graph.call_function(torch.ops.air.wait.default, ([record_default],))"),
    ],
)  # fmt: skip
def test_the_warning_says_which_line_to_add_and_where(
    function: Callable[..., Any], options: dict[str, Any], line: str
) -> None:
    """In the words of the API that the program uses, with the file and the number of the line before which it belongs."""
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.compile(function, backend="npugraph_ex", fullgraph=True, options=options)(torch.ones(4, device="npu"))
    (warning,) = [warning for warning in caught if warning.category is StreamOrderWarning]
    said = str(warning.message)
    lines, first = inspect.getsourcelines(function)
    place = f"{__file__}:{first + next(number for number, text in enumerate(lines) if '# here' in text)}"
    assert f"{warning.filename}:{warning.lineno}" == place
    assert f"before {place} add `{line}` on the main stream" in said
    assert len(re.findall(r"^error \[", said, re.MULTILINE)) == 1
    torch.compiler.reset()


def two_events(x: torch.Tensor) -> torch.Tensor:
    """One side stream records an event, the other none; nobody waits."""
    first, second = torch.npu.Stream(), torch.npu.Stream()
    done = torch.npu.Event()
    for side in (first, second):
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        a = x * 2
    with torch.npu.stream(second):
        b = x * 3
        done.record()
    return a + b  # here


def assigned(x: torch.Tensor) -> torch.Tensor:
    """As `two_events`, with an event that the stream makes, and variables with the names of new events."""
    first, second = torch.npu.Stream(), torch.npu.Stream()
    event, event_2 = x, x
    for side in (first, second):
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        a = event * 2
    with torch.npu.stream(second):
        b = event_2 * 3
    done = second.record_event()  # noqa: F841 - the repair waits for it
    return a + b  # here


def recorded_twice(x: torch.Tensor) -> torch.Tensor:
    """The event stands for another record when the wait is missing."""
    first, second = torch.npu.Stream(), torch.npu.Stream()
    done = torch.npu.Event()
    for side in (first, second):
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        a = x * 2
        done.record()
    with torch.npu.stream(second):
        b = x * 3
        done.record()
    return a + b  # here


def waited_for(x: torch.Tensor) -> torch.Tensor:
    """The record is that of `wait_stream`, which has no name; two repairs need names of their own."""
    first, second, third = (torch.npu.Stream() for _ in range(3))
    for side in (first, second):
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        a = x * 2
    with torch.npu.stream(second):
        b = x * 3
    third.wait_stream(first)
    third.wait_stream(second)
    return a + b  # here


NEW_AND_AWAITED: dict[Callable[..., Any], tuple[list[str], list[str]]] = {
    two_events: (["event"], ["done", "event"]),
    assigned: (["event_3"], ["done", "event_3"]),
    recorded_twice: (["event"], ["done", "event"]),
    waited_for: (["event", "event_2"], ["event", "event_2"]),
}


@pytest.mark.parametrize("function", NEW_AND_AWAITED)
def test_the_lines_name_the_programs_own_event_or_a_new_one(function: Callable[..., Any]) -> None:
    """All repairs of a graph are written into its source: then the check finds no missing edge."""
    said = "\n".join(warned(function))
    adds = re.findall(r"(after|before) \S+:(\d+) add `(.+?)`", said)
    lines, first = inspect.getsourcelines(function)
    new = sorted(
        name for _, _, line in adds for name in re.findall(r"^(\w+) = torch.npu.current_stream\(\).record_event", line)
    )
    awaited = sorted(name for _, _, line in adds for name in re.findall(r"\.wait_event\((.+)\)", line))
    assert (new, awaited) == NEW_AND_AWAITED[function]
    for where, number, line in sorted(adds, key=lambda add: int(add[1]), reverse=True):
        at = int(number) - first
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines.insert(at + (where == "after"), f"{indent}{line}\n")
    names: dict[str, Any] = {"torch": torch}
    text = "".join(lines)
    name = f"<{function.__name__} repaired>"
    linecache.cache[name] = len(text), None, lines, name
    exec(compile(text, name, "exec"), names)  # noqa: S102 - the program with the repairs
    assert not [one for one in warned(names[function.__name__]) if "write]" in one]


def test_a_warning_that_is_an_error_is_told_as_a_refusal() -> None:
    """A filter of the program makes it one: `explain` and its SARIF file have the finding, as with "raise"."""
    torch.compiler.reset()
    watch = Watch()
    fast, x = torch.compile(native, backend="npugraph_ex", fullgraph=True), torch.ones(4, device="npu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamOrderWarning)
        with pytest.raises(Exception, match="read-after-write"):
            fast(x)
    assert [one.code.value for one in watch.explanation().refused] == ["read-after-write"]
    torch.compiler.reset()


def warned(function: Callable[..., Any]) -> list[str]:
    """What the check says of a function."""
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.compile(function, backend="npugraph_ex", fullgraph=True)(torch.ones(4, device="npu"))
    torch.compiler.reset()
    return [str(one.message) for one in caught if one.category is StreamOrderWarning]
