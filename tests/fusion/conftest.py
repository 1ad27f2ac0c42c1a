"""Lets the tests of this folder import their helpers: ``fx_helpers``, shared with others, and their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# pytest's importlib mode puts nothing on the path.
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of a table its rows."""
    if metafunc.cls is not None and hasattr(metafunc.cls, "table"):
        from fusion_cases import hand_out_rows

        hand_out_rows(metafunc)
