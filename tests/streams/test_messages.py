"""Who forgets one wait is told, while the program is compiled, which line to add and where."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from npugraph_ex import ops, scope
from npugraph_ex.errors import StreamOrderWarning

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
    torch._dynamo.reset()
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
    torch._dynamo.reset()
