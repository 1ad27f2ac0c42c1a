"""Lets the tests of this folder import their helpers: ``fx_helpers``, shared with others, and their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts nothing on the path.
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test starts without user rules, and nobody sees those that it registers."""
    import torch  # not before the device has started

    from npugraph_ex.fusion import engine, registry

    rules = registry.Registry()
    monkeypatch.setattr(registry, "USER_RULES", rules)
    monkeypatch.setattr(engine, "USER_RULES", rules)
    registry.warn_once.cache_clear()
    yield
    torch._dynamo.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of a table its rows."""
    if metafunc.cls is not None and hasattr(metafunc.cls, "table"):
        from fusion_cases import hand_out_rows

        hand_out_rows(metafunc)
