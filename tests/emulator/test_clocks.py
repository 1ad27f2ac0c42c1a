"""Past accesses that are put off until they matter find the races that each comparison at once would find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_emulator.races.access import Access, overlap
from npu_emulator.races.clocks import Clock, Domain, Found, Operation, join

_STREAMS = 3


def _access(start: int, count: int, step: int, *, writes: bool) -> Access:
    return Access(start, start + (count - 1) * step + 1, 1, (count,), (step,), writes)


_accesses = st.builds(_access, st.integers(0, 2), st.integers(1, 2), st.integers(1, 2), writes=st.booleans())
_steps = st.tuples(
    st.integers(0, _STREAMS - 1), st.none() | st.integers(0, _STREAMS - 1), st.lists(_accesses, min_size=1, max_size=3)
)
"""A stream, another one that it waits for first, and what its operation touches."""


class _AtOnce:
    """Each access is compared with all earlier ones, but those that a later one has replaced."""

    def __init__(self) -> None:
        self.past: list[tuple[Access, Operation]] = []

    def touch(self, operation: Operation, access: Access, known: Clock, found: Found) -> None:
        kept = []
        for earlier, who in self.past:
            ordered = known.get(who.stream, 0) >= who.number
            if not ordered and (access.writes or earlier.writes) and (shared := overlap(earlier, access)):
                found(who, earlier, operation, access, shared)
            covers = access.start <= earlier.start and earlier.end <= access.end and access.is_dense
            replaces = (access.writes or not earlier.writes) and (covers or access[:5] == earlier[:5])
            if not (ordered and replaces):
                kept.append((earlier, who))
        self.past = [*kept, (access, operation)]


@pytest.mark.slow
@settings(max_examples=500)
@given(st.lists(_steps, max_size=30))
def test_the_same_races_are_found(steps: list[tuple[int, int | None, list[Access]]]) -> None:
    """Over three streams that wait for each other now and then, in the same order."""
    domain, at_once = Domain(), _AtOnce()
    found: list[tuple[object, ...]] = []
    expected: list[tuple[object, ...]] = []
    for stream, awaited, accesses in steps:
        if awaited is not None:
            join(domain.clock(stream), domain.clock(awaited))
        operation = Operation("op", (), stream, domain.next_number(stream))
        domain.touch(operation, accesses, lambda *race: found.append(race))
        for access in accesses:
            at_once.touch(operation, access, domain.clock(stream), lambda *race: expected.append(race))
    assert found == expected


def test_one_stream_keeps_what_it_touches_once() -> None:
    """Ten thousand writes of ten places are ten past accesses, and parts of a whole are few."""
    domain = Domain()
    for turn in range(1_000):
        accesses = [_access(8 * place, 4, 1, writes=True) for place in range(10)]
        parts = [_access(200 + turn % 600, 1, 1, writes=True), _access(200, 600, 1, writes=True)]
        operation = Operation("op", (), 0, domain.next_number(0))
        domain.touch(operation, [*accesses, *parts], lambda *_: None)
    (page,) = domain._pages.values()
    assert len(page._past) + len(page._recent) < 600
