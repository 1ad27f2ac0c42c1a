"""`cache_compile` and `readable_cache`: a compilation that is kept on disk. Not available yet; each call says so."""

from __future__ import annotations

from typing import NoReturn

from npugraph_ex.errors import NotAvailableError

__all__ = ["cache_compile", "readable_cache"]


def cache_compile(func: object, **options: object) -> NoReturn:
    """Compile a method once and keep the result on disk: refused until it can be done.

    Raises:
        NotAvailableError: always.
    """
    del func, options
    raise NotAvailableError(
        "npugraph_ex.inference.cache_compile is not available yet; use torch.compile(model, backend='npugraph_ex'), "
        "which compiles in each process"
    )


def readable_cache(cache_bin: object, print_output: object = True, file: object = None) -> NoReturn:  # noqa: FBT002 - the signature that torch_npu forwards to
    """Print a cached compilation: refused until there is one.

    Raises:
        NotAvailableError: always.
    """
    del cache_bin, print_output, file
    raise NotAvailableError("npugraph_ex.inference.readable_cache is not available yet: nothing writes such a cache")
