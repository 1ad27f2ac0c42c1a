"""The setting that makes AOT keep its results."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 has a second setting with which AOT keeps its results.",
    since=(2, 11),
    new=("torch._functorch.config.force_autograd_cache",),
    test="tests/frontend/test_aot_compile.py",
)


def settings_that_keep_results() -> tuple[str, ...]:
    """The names of the settings of AOT that make it keep its results."""
    return ("bundled_autograd_cache",) if DIFFERENCE.older else ("bundled_autograd_cache", "force_autograd_cache")
