"""Where graph after graph is made, garbage is collected rarely, and afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from npugraph_ex._garbage_collection import rare_collection


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "inside"), [(700, 20_000), (50_000, 50_000), (0, 0)])
def test_collection_is_rare_in_the_block(before: int, inside: int) -> None:
    """Never more often than the program wants it, never where it wants none, and the same afterwards."""
    gc.set_threshold(before, 10, 10)
    with rare_collection():
        assert gc.get_threshold() == (inside, 10, 10)
    assert gc.get_threshold() == (before, 10, 10)
