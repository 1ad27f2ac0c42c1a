"""Who touches which bytes of one memory next: as a search through all accesses says, and without one."""

from __future__ import annotations

import random

import pytest
from torch import fx

from npugraph_ex.graph.memory.history import History, MemoryAccess
from npugraph_ex.graph.memory.regions import UNKNOWN, Region, Union

LENGTH = 300
NODE = fx.Graph().placeholder("x")


def random_region(rng: random.Random) -> Region:
    """Bytes of memory 0: most often few, sometimes all, rarely of unknown memory."""
    kind = rng.random()
    if kind < 0.05:
        return Region(UNKNOWN)
    start = rng.randrange(400)
    return Region(0) if kind < 0.1 else Region(0, start, start + rng.choice((1, 8, 8, 100)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_the_same_as_looking_at_each(seed: int) -> None:
    """Whatever was touched, in whatever order it was noted, before questions and between them."""
    rng = random.Random(seed)
    history, known = History(LENGTH), list[MemoryAccess]()
    for _ in range(400):
        access = MemoryAccess(rng.randrange(LENGTH), NODE, NODE, random_region(rng))
        history.add(access)
        known.append(access)
        region, position = random_region(rng), rng.randrange(-1, LENGTH)
        expected = [one for one in known if one.position > position and one.region.overlaps(region)]
        found = list(history.after(region, position))
        assert [one.position for one in found] == sorted(one.position for one in found)
        assert sorted(map(id, found)) == sorted(map(id, expected))


def test_other_rows_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of rows, asking for the next access to one looks at a few dozen places."""
    rows = 4096
    history = History(2 * rows)
    for row in range(rows):
        for position in (row, rows + row):
            history.add(MemoryAccess(position, NODE, NODE, Region(0, 64 * row, 64 * row + 64)))
    asked: list[object] = []
    for kind in (Region, Union):
        plain = kind.overlaps
        monkeypatch.setattr(kind, "overlaps", lambda *args, plain=plain: asked.append(args) or plain(*args))
    for row in range(0, rows, 64):
        region = Region(0, 64 * row, 64 * row + 64)
        assert [access.position for access in history.after(region, row)] == [rows + row]
        assert list(history.after(region, rows + row)) == []
    assert len(asked) < rows // 64 * 2 * 100


@pytest.mark.parametrize("seed", range(8))
def test_a_union_of_regions(seed: int) -> None:
    """Bytes taken in one region after another, touching and nested ones among them, are those of all of them."""
    rng = random.Random(seed)
    union, bytes_ = Union(), set[int]()
    for _ in range(60):
        start = rng.randrange(200)
        stop = start + rng.choice((1, 2, 5, 40))
        if rng.random() < 0.5:
            union.add(Region(0, start, stop))
            bytes_.update(range(start, stop))
        assert union.overlaps(Region(0, start, stop)) == any(byte in bytes_ for byte in range(start, stop))
        assert not union.overlaps(Region(1, start, stop))
