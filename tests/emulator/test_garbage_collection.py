"""The garbage collector while the emulator starts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from npu_emulator.garbage_collection import without_collector


class _Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    yield
    (gc.freeze if frozen else gc.unfreeze)()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.slow
def test_what_a_block_makes_is_old_and_collectable() -> None:
    """Nothing is collected inside; afterwards a cycle made inside is in the oldest generation, and goes when nobody holds it."""
    gc.enable()
    with without_collector():
        assert not gc.isenabled()
        node = _Node()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(found is node for found in gc.get_objects(generation=2))
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


def test_a_failure_inside_switches_it_on_again() -> None:
    """An import that fails leaves the collector as it was."""
    gc.enable()
    with pytest.raises(ImportError), without_collector():
        raise ImportError
    assert gc.isenabled()


def test_who_switched_it_off_or_froze_objects_finds_that() -> None:
    """A program's own choice stands: a collector that is off stays off, frozen objects stay frozen."""
    gc.disable()
    with without_collector():
        pass
    assert not gc.isenabled()
    gc.enable()
    node = _Node()
    gc.freeze()
    with without_collector():
        pass
    assert gc.isenabled()
    # One object stands for all: the count of frozen objects falls whenever another thread lets go of one.
    assert gc.get_freeze_count() > 0
    assert not any(found is node for found in gc.get_objects())
