"""How many programs validation tries, and where its counterexamples go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from npugraph_ex.testing.arguments import check_folder, check_least


@dataclass(frozen=True)
class Effort:
    """How much to try, and where counterexamples go.

    Attributes:
        examples: random programs for each replacement, at least one.
        dtypes: of the pattern's floating-point arguments; None for float16, bfloat16 and float32.
        seed: the same seed tries the same.
        expect: in how many programs it must be fused at least.
        folder: where counterexamples are written; None for nowhere.
        setup: lines of Python that register the replacement in a counterexample.
        after_each: called after each program with the share of the programs that were tried.
    """

    examples: int = 60
    dtypes: tuple[torch.dtype, ...] | None = None
    seed: int = 0
    expect: int = 1
    folder: Path | None = None
    setup: str = ""
    after_each: Callable[[float], object] | None = None

    def __post_init__(self) -> None:
        check_least("max_examples", self.examples, 1)
        check_least("expect_matches", self.expect, 0)
        if self.dtypes is not None and not (self.dtypes and all(map(_is_floating, self.dtypes))):
            raise ValueError(f"dtypes must be floating-point torch dtypes, at least one; they are {list(self.dtypes)}.")
        if self.folder is not None:
            check_folder("report_dir", self.folder)


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
