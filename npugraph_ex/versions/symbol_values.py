"""The values that symbolic sizes have in the example inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 calls the table of these values `backed_var_to_val`; torch 2.10 calls it `var_to_val`.",
    since=(2, 11),
    test="tests/saving",
)


def symbol_values(environment: Any) -> Mapping[Any, Any]:
    """The value of each symbol of a `ShapeEnv` that has one."""
    values: Mapping[Any, Any] = environment.var_to_val if DIFFERENCE.older else environment.backed_var_to_val
    return values
