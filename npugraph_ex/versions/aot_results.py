"""What torch keeps of a function that it compiles ahead of time: the settings of AOT for it, and its bytes."""

from __future__ import annotations

from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 has more settings with which AOT keeps its results, and wraps the bytes of a compiled function.",
    since=(2, 11),
    new=("torch._functorch.config.force_autograd_cache", "torch._functorch.config.bypass_autograd_cache_key"),
    test="tests/frontend/test_aot_compile.py",
)


def settings_that_keep_results() -> tuple[str, ...]:
    """The names of the settings of AOT that make it keep its results."""
    return ("bundled_autograd_cache",) if DIFFERENCE.older else ("bundled_autograd_cache", "force_autograd_cache")


def settings_of_precompilation() -> tuple[str, ...]:
    """The names of the settings that torch makes while it compiles one function ahead of time."""
    names = ("strict_autograd_cache", "force_non_lazy_backward_lowering", *settings_that_keep_results())
    return names if DIFFERENCE.older else ("bypass_autograd_cache_key", *names)


def bytes_of(serialized: Any) -> bytes:
    """The bytes in what torch's ``AOTCompiledFunction.serialize`` returned."""
    data: bytes = serialized if DIFFERENCE.older else serialized.serialized_data
    return data
