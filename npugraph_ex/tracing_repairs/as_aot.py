"""Traces as AOT does in a compilation of this library, so that a rule finds what a compiled graph has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from npugraph_ex import _torch_private
from npugraph_ex.tracing_repairs import (
    attention_scales,
    idle_dropouts,
    pads,
    unused_draws,
    whole_margin_loss,
    whole_upsampling,
)

_REPAIRS = (attention_scales, idle_dropouts, pads, unused_draws, whole_margin_loss, whole_upsampling)


@contextmanager
def as_aot_traces() -> Iterator[None]:
    """Within the block a trace has what AOT's has here: operators that torch would take apart or drop. No other thread compiles.

    What the repairs change belongs to the process, so two threads would leave it as the other found it.
    """
    with ExitStack() as stack:
        stack.enter_context(_torch_private.compiling_alone())
        for repair in _REPAIRS:
            stack.enter_context(repair.kept())
        yield
