"""Defines the operators of clients' libraries from their records, where the client's library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from npugraph_ex import _torch_private
from npugraph_ex.fusion import rules, trace_cache
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.operators import OPERATORS, Operator


def _is_missing(record: Operator) -> bool:
    return bool(record.schema) and record.overload is None


@contextmanager
def client_operators() -> Iterator[None]:
    """Within the block, the operators exist, and the rules about them can be prepared."""
    missing = [record for record in OPERATORS.values() if _is_missing(record)]
    if not missing:
        yield
        return
    with ExitStack() as libraries:
        library_of = {
            namespace: libraries.enter_context(_torch_private.scoped_library(namespace))
            for namespace in {record.name.partition("::")[0] for record in missing}
        }
        for record in missing:
            namespace, _, operator = record.name.partition("::")
            library = library_of[namespace]
            library.define(f"{operator}{record.schema}")
            assert record.formula is not None  # noqa: S101 - a record with a schema has a formula
            assert record.fake is not None  # noqa: S101 - as above
            library.impl(operator, record.formula, "CompositeExplicitAutograd")
            torch.library.register_fake(record.name, record.fake, lib=library)
        warn_once.cache_clear()
        yield
    rules.forget()
    trace_cache.forget()
    warn_once.cache_clear()
