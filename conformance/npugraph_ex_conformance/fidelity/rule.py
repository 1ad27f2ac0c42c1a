"""A rule, and what probes are made of: codes of errors, captures, queued work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

HEADER = "header error_codes/rt_error_codes.h"
RUNTIME = "header acl_rt.h"
TORCH = "PyTorch's documentation"
TORCH_NPU = "torch_npu's code"
ASSUMED = "assumed"
_CODE = re.compile(r"\b[125]07\d{3}\b")


@dataclass(frozen=True)
class DeviceRule:
    """A rule that a device obeys.

    Attributes:
        name: ``part.rule``.
        says: the rule, in a sentence.
        source: where it is written, and the place there; "assumed" where that was not found.
        probe: asks the device; its answer can be written as JSON.
        answer: of the emulated device.
    """

    name: str
    says: str
    source: str
    probe: Callable[[], Any]
    answer: Any

    @property
    def is_assumed(self) -> bool:
        """Whether only hardware can say whether the rule is right."""
        return self.source.startswith(ASSUMED)


def code(action: Callable[[], object]) -> str:
    """CANN's code of the error that an action raises, or its class; "done" without an error."""
    try:
        action()
        torch.npu.synchronize()
    except Exception as error:  # noqa: BLE001 - which it is, is the answer
        found = _CODE.search(str(error))
        return found[0] if found else type(error).__name__
    return "done"


def ones(*sizes: int) -> torch.Tensor:
    """Ones on the device."""
    return torch.ones(*(sizes or (4,)), device="npu")


def held(action: Callable[[], Any]) -> str:
    """As `code`, without waiting for the device, which a capture does not allow."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - as above
        found = _CODE.search(str(error))
        return found[0] if found else type(error).__name__
    return "done"


def in_capture(action: Callable[[torch.Tensor], Any], mode: str = "global", *, other_thread: bool = False) -> str:
    """What an action answers in a capture, whose graph is thrown away; ``x`` was computed by the capture."""
    answer, base = "", ones()
    before, graph, own = torch.npu.current_stream(), torch.npu.NPUGraph(), torch.npu.Stream()
    try:
        # The outer block puts the current stream back where ending the capture fails; torch.npu.graph alone does not.
        with torch.npu.stream(before), torch.npu.graph(graph, stream=own, capture_error_mode=mode):
            x = base + 1
            if other_thread:
                with ThreadPoolExecutor(1) as pool:
                    answer = pool.submit(held, lambda: action(x)).result()
            else:
                answer = held(lambda: action(x))
    except RuntimeError:  # some answers leave the capture without an end
        pass
    return answer


def elsewhere(action: Callable[[], Any]) -> Any:
    """An action on a stream that is not captured."""
    with torch.npu.stream(torch.npu.Stream()):
        return action()


def captured(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Any]:
    """A graph, and what the function returned in its capture."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        found = function(*inputs)
    return graph, found


def replayed(function: Callable[[torch.Tensor], torch.Tensor], values: Iterable[float] = (2.0, 5.0)) -> list[float]:
    """The first element that each replay computes when its input is filled with each value."""
    x = ones()
    graph, y = captured(function, x)
    found = []
    for value in values:
        x.fill_(value)
        graph.replay()
        found.append(y.flatten()[0].item())
    return found
