"""Random programs are small: none of their branches is worth its events. Here events cost nothing, so that branches pay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from npugraph_ex.passes import auto_streams


@contextmanager
def free_events() -> Iterator[None]:
    """Within the block the option `auto_streams` divides every window with two branches."""
    before, auto_streams.EVENTS_US = auto_streams.EVENTS_US, 0.0
    try:
        yield
    finally:
        auto_streams.EVENTS_US = before
