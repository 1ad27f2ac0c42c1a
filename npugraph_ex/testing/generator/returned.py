"""What a program returns."""

from __future__ import annotations

from collections.abc import Sequence

from npugraph_ex.testing.generator.builder import Builder


def returned_values(builder: Builder, always: Sequence[str]) -> tuple[str, ...]:
    """The given values, and some others."""
    others = [name for name in builder.values if name not in always and not name.startswith("x")]
    count = builder.choices.number(0, min(3, len(others)))
    chosen = [str(builder.pick(others)) for _ in range(count)]
    if builder.chance(10):
        chosen.append(str(builder.pick(builder.values)))
    return tuple(dict.fromkeys((*always, *chosen)))
