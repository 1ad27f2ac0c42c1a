"""What the tests of fusion share: a registry of user rules of their own, and the rows of tables of cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test starts without user rules, and nobody sees those that it registers."""
    import torch  # not before the device has started

    from npugraph_ex.fusion import engine, registry
    from npugraph_ex.passes import fusion

    rules = registry.RuleRegistry()
    for module in (registry, engine, fusion):
        monkeypatch.setattr(module, "USER_RULES", rules)
    registry.warn_once.cache_clear()
    yield
    torch.compiler.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of a table its rows."""
    if metafunc.cls is not None and hasattr(metafunc.cls, "table"):
        from fusion_cases import hand_out_rows

        hand_out_rows(metafunc)
