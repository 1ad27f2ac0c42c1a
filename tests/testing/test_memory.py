"""The check that a replay allocates nothing and gives back what it handed out notices both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.aclgraph.captured_graph import CapturedGraph
from npugraph_ex.testing import Case, Input
from npugraph_ex.testing.oracle.memory import replay_uses_memory

CASE = Case(
    "def program(x0):\n    v0 = torch.ops.aten.mul.Tensor(x0, 3)\n    return (torch.ops.aten.flip.default(v0, [0]),)\n",
    (Input((4, 8), "int32"),),
)
kept: list[torch.Tensor] = []


def _allocates() -> torch.Tensor:
    return torch.empty(1024, device="npu")


@pytest.fixture(autouse=True)
def _emptied() -> None:
    kept.clear()


def test_a_call_that_allocates_is_noticed() -> None:
    """Also if everything is given back; results may be copies, with a block each."""
    assert "allocates: 1 blocks" in str(replay_uses_memory(lambda: (_allocates(), ())[1:], ()))
    assert "allocates: 3 blocks" in str(replay_uses_memory(lambda: (_allocates() + _allocates(),), ()))
    assert replay_uses_memory(lambda: (_allocates(), _allocates()), ()) is None
    assert replay_uses_memory(lambda: (), ()) is None


def test_a_call_that_frees_what_was_there_is_noticed() -> None:
    """Bytes in use must be what they were, no fewer and no more."""
    blocks = [torch.empty(1024, device="npu") for _ in range(3)]
    assert "keeps memory: -" in str(replay_uses_memory(lambda: (blocks.pop(),), ()))


@pytest.mark.parametrize(
    ("extra", "what"),
    [(lambda: kept.append(_allocates()), "keeps memory: 4608 bytes more"), (_allocates, "allocates: 1 blocks")],
    ids=["kept", "dropped"],
)
def test_the_oracle_asks(extra: Callable[[], object], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that takes memory beside what it computes is a failure of the case."""
    assert testing.check(CASE).failures == []
    right = CapturedGraph.replay

    def replay(self: CapturedGraph, *inputs: object) -> object:
        extra()
        return right(self, *inputs)

    monkeypatch.setattr(CapturedGraph, "replay", replay)
    (failure,) = testing.check(CASE).failures
    assert failure.startswith(f"replay {what}")


def test_a_graph_that_is_not_captured_is_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running operator by operator instead would equal the optimised graph trivially."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no capture today")

    monkeypatch.setattr(CapturedGraph, "__init__", refuse)
    (failure,) = testing.check(CASE).failures
    assert "no capture today" in failure
