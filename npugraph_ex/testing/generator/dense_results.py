"""Copies of a pattern's results in place of them, for a rule that may change their strides only where nobody sees them."""

from __future__ import annotations

import torch

from npugraph_ex.testing.generator.builder import Builder, Value
from npugraph_ex.testing.generator.inputs import Dim
from npugraph_ex.testing.generator.planted import Planted


def copy_densely(builder: Builder, planted: Planted) -> None:
    """Put copies, made in up to two steps, in place of the results."""
    for position, name in enumerate(planted.outputs):
        shape, dtype = planted.results[name]
        last = name
        for what in builder.choices.order(("sign", "sum", "halves"))[: builder.choices.number(0, 2)]:
            last = _further(builder, name, last, shape, dtype, what)
        keywords = (("memory_format", torch.contiguous_format),)
        copy = builder.emit("aten.clone.default", last, shape=shape, dtype=dtype, keywords=keywords)
        for between in {name, last}:
            del builder.values[between]
        builder.values[copy] = Value(shape, dtype)
        planted.outputs[position] = copy
        planted.results = {**planted.results, copy: (shape, dtype)}


def _further(builder: Builder, name: str, last: str, shape: tuple[Dim, ...], dtype: torch.dtype, what: str) -> str:
    """A value that has the strides of ``last``, which comes of the result ``name``, or strides of its own."""
    whole = isinstance(shape[-1], int) and shape[-1] % 2 == 0
    if what == "sign" or (what == "halves" and not whole):
        made = builder.emit("aten.neg.default", last, shape=shape, dtype=dtype)
    elif what == "sum":
        made = builder.emit("aten.add.Tensor", last, name, shape=shape, dtype=dtype)
    else:
        half = (*shape[:-1], int(shape[-1]) // 2)
        parts = builder.emit_parts("aten.split.Tensor", last, half[-1], -1, shapes=(half, half), dtype=dtype)
        made = builder.emit("aten.cat.default", parts, -1, shape=shape, dtype=dtype)
        for part in parts:
            del builder.values[part]
    if last != name:
        del builder.values[last]
    return made
