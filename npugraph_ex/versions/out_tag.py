"""The tag of operators that write into `out` arguments and return them."""

from __future__ import annotations

import re
from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.13 tags the operators that return their `out` arguments; before, their schemas tell.",
    since=(2, 13),
    test="tests/versions/test_differences.py",
)


def has_out_tag(overload: Any, schema: Any) -> bool:
    """Whether an operator with this schema has the tag. Before torch 2.13 no operator of a client has it."""
    import torch

    return by_schema(schema) if DIFFERENCE.older else torch.Tag.out in overload.tags


def by_schema(schema: Any) -> bool:
    """Whether torch 2.13 gives an operator of torch or torch_npu the tag: it returns what it writes, or its name says so."""
    if schema.name.partition("::")[0] not in {"aten", "npu"}:
        return False
    written = sum(argument.is_out for argument in schema.arguments)
    named = re.search(r"(^|_)out($|_)", schema.overload_name)
    return bool(written and written == len(schema.returns)) or named is not None
