"""Forward-mode derivatives: a compiled function gives those of eager mode, in whichever order levels and other calls come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled
from torch.autograd import forward_ad

from npugraph_ex.errors import CaptureError, SessionError
from npugraph_ex.inference import session
from npugraph_ex.versions.dual_tensors import DIFFERENCE


def _function(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sin().mul_(2)


def _tangent(function: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x + 1))).tangent


@pytest.mark.slow
@pytest.mark.parametrize("first", ["plain", "dual"])
def test_a_compiled_function_keeps_tangents(first: str) -> None:
    """A graph would drop them: it has outputs for values only."""
    torch.compiler.reset()
    # Since torch 2.14 Dynamo leaves a call with tangents to eager mode, which `fullgraph` forbids.
    graph, x = torch.compile(_function, backend="npugraph_ex", fullgraph=DIFFERENCE.older), torch.rand(4, device=NPU)
    expected = _tangent(_function, x)
    if first == "plain":
        graph(x)
    for _ in range(3):
        torch.testing.assert_close(_tangent(graph, x), expected)
        torch.testing.assert_close(graph(x), _function(x))


def test_a_required_capture_is_refused() -> None:
    """`require_capture` raises where the function would run as in eager mode; since torch 2.14 Dynamo does by `fullgraph`."""
    refusal = "forward-mode derivatives" if DIFFERENCE.older else "dual tensor"
    with pytest.raises(Exception, match=refusal) as raised:
        _tangent(compiled(_function, require_capture=True), torch.rand(4, device=NPU))
    assert not DIFFERENCE.older or isinstance(raised.value, CaptureError) or "CaptureError" in str(raised.value)


def test_a_session_refuses_another_level() -> None:
    """A session replays without the guards of Dynamo, so it compares the level itself."""
    x = torch.rand(4, device=NPU)
    with torch.no_grad():
        step = session(torch.nn.Tanh(), (x,))
        with pytest.raises(SessionError, match="levels of forward-mode derivatives"):
            _tangent(step, x)
