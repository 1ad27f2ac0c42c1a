"""Where the processor time of a conformance example goes: its stages, timed by wrapping the functions that they are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import npugraph_ex
from npugraph_ex.testing.generator import strategies
from npugraph_ex.testing.oracle import checking as oracle
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle import without_device as fx_level

_STAGES: tuple[tuple[Any, str, str], ...] = (
    (strategies, "sample", "draw"),
    (tracing, "trace", "trace"),
    (tracing, "copy_of", "trace"),
    (oracle, "optimise", "passes"),
    (npugraph_ex, "compile_fx", "passes"),
    (oracle, "compile_graph", "capture, replay"),
    (oracle, "make_inputs", "inputs"),
    (fx_level, "make_inputs", "inputs"),
    (oracle, "refill", "inputs"),
    (fx_level, "_observed", "run"),
    (oracle, "observe", "compare"),
    (oracle, "judge_values", "judge"),
    (fx_level, "judge_values", "judge"),
    (oracle, "_compare_exactly", "compare"),
    (oracle, "_compare_with_eager", "compare"),
    (fx_level, "compare_on_host", "compare"),
)
_SESSIONS = ("eager", "op by op", "capture, replay")
"""The three ways in which a case makes its calls, in this order."""


@dataclass
class Stages:
    """Processor seconds by stage; what a stage calls of another counts for that one."""

    seconds: Counter[str] = field(default_factory=Counter)
    _inner: list[float] = field(default_factory=list)
    _sessions: int = 0

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``function``, whose time is counted for the stage ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.process_time() - start
                self.seconds[name] += whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return call

    def session(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """All calls of a case in one way, counted for that way."""
        ways = [self.timed(run, name) for name in _SESSIONS]

        def call(*args: Any) -> Any:
            self._sessions += 1
            return ways[(self._sessions - 1) % len(ways)](*args)

        return call


@contextmanager
def stages() -> Iterator[Stages]:
    """Time what is checked in the block."""
    found = Stages()
    with ExitStack() as stack:
        for module, name, stage in _STAGES:
            wrapped = found.timed(getattr(module, name), stage)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        stack.enter_context(mock.patch.object(oracle, "_session", found.session(oracle._session)))
        yield found
