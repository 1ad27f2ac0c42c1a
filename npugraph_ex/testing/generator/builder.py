"""Grows a program from random choices: values that have a wanted shape and dtype, and uses of values that exist.

Values are made backwards ("something of shape (s0, 64) in float16") and used forwards ("something with one of these"),
so every draw is a legal program and nothing has to be rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import LAYOUTS, Dim, Input, Integers
from npugraph_ex.testing.generator.program import Ref, Step

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_UNARY = ("neg", "abs", "relu", "sigmoid", "tanh", "silu", "clone")
_PERMUTING = frozenset(
    {
        f"aten.{view}"
        for view in (
            "transpose.int",
            "slice.Tensor",
            "unsqueeze.default",
            "select.int",
            "split.Tensor",
            "diagonal.default",
        )
    }
)
_EXACT = (
    "neg", "not", "xor", "add", "copy", "copy", "transpose", "slice", "cat", "mirror", "flat", "difference", "wider", "copy",
    "take", "difference",
)  # fmt: skip
"""What follows an integer, as often as named."""
_WITHIN = frozenset({"slice", "cat", "flat", "take", "difference"})
"""Of these, what needs elements beside each other."""
_COPIES = (
    ("aten.clone.default",), ("aten.alias.default",), ("aten.clone.default",), ("aten.add.Tensor", 0), ("aten.mul.Tensor", 1),
)  # fmt: skip
"""What has the elements of an integer."""
_BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default")
_LOGICAL = ("bitwise_and.Tensor", "bitwise_xor.Tensor", "bitwise_or.Tensor")
"""Of masks: torch subtracts none, and a sum of two is no mask."""


@dataclass(frozen=True)
class Value:
    """Name, shape and dtype of a value, and what may be done with it.

    Attributes:
        shape: symbolic.
        dtype: torch's.
        memory_of: the input that its memory is, if any.
        contiguous: whether it certainly is; where this is False it may be all the same.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    memory_of: str | None = None
    contiguous: bool = True


@dataclass
class Builder:
    """A program while it is being drawn.

    Attributes:
        choices: what it is drawn with.
        inputs: so far.
        steps: so far.
        values: what may be used further, by name.
    """

    choices: Choices
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    _count: int = 0

    def chance(self, percent: int) -> bool:
        """True with about this probability; shrinks to False."""
        return self.choices.chance(percent)

    def pick(self, options: Iterable[Any]) -> Any:
        """One of the options; shrinks to the first."""
        return self.choices.pick(tuple(options))

    def new_input(self, shape: tuple[Dim, ...], dtype: torch.dtype, *, plain: bool = False) -> str:
        """A new argument of the program, sometimes one that shares an earlier one's memory."""
        position = len(self.inputs)
        name = f"x{position}"
        twins = [
            i
            for i, x in enumerate(self.inputs)
            if x.shape == shape and x.torch_dtype == dtype and x.alias_of is x.below is x.least is None
        ]
        seed = self.choices.number(0, 999)
        spec = Input(shape, str(dtype).removeprefix("torch."), seed=seed)
        if twins and not plain and self.chance(15):
            twin = self.pick(twins)
            spec = dataclasses.replace(self.inputs[twin], alias_of=twin)
            self.values[name] = self.values[f"x{twin}"]
        else:
            layout: Any = "contiguous" if plain else self.pick((*("contiguous",) * 3, *LAYOUTS))
            scale = self.pick((1.0, 1.0, 0.001, 30.0)) if dtype.is_floating_point else 1.0
            in_rows = dtype == torch.bool and not plain and self.chance(25)
            spec = dataclasses.replace(spec, layout=layout, scale=scale, whole=1 if in_rows else None)
            self.values[name] = Value(shape, dtype, name, layout in ("contiguous", "offset"))
        self.inputs.append(spec)
        return name

    def new_integers(self, shape: tuple[Dim, ...], dtype: torch.dtype, within: Integers) -> str:
        """A new argument of integers that are within bounds, often at one of them, and stay so: nothing writes it."""
        name, layout = f"x{len(self.inputs)}", self.pick((*("contiguous",) * 3, *LAYOUTS))
        spec = Input(shape, str(dtype).removeprefix("torch."), layout, seed=self.choices.number(0, 999))
        self.inputs.append(spec.within(within))
        self.values[name] = Value(shape, dtype, None, layout in ("contiguous", "offset"))
        return name

    def emit(
        self,
        operator: str,
        *args: Any,
        shape: tuple[Dim, ...],
        dtype: torch.dtype,
        memory_of: str | None = None,
        keywords: tuple[tuple[str, Any], ...] = (),
    ) -> str:
        """Append a step with one result of this shape and dtype; strings among the arguments are names of values."""
        (name,) = self.emit_parts(operator, *args, shapes=(shape,), dtype=dtype, memory_of=memory_of, keywords=keywords)
        return name

    def emit_parts(
        self,
        operator: str,
        *args: Any,
        shapes: Sequence[tuple[Dim, ...]],
        dtype: torch.dtype,
        memory_of: str | None = None,
        keywords: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[str, ...]:
        """As ``emit``, with a result of each of the shapes."""
        names = tuple(f"v{self._count + position}" for position in range(len(shapes)))
        self._count += len(names)
        refs = tuple(Ref(a) if isinstance(a, str) else tuple(map(Ref, a)) if _names(a) else a for a in args)
        self.steps.append(Step(operator, refs, keywords, names))
        sources = [self.values[r.name] for r in _flat(refs) if isinstance(r, Ref) and r.name in self.values]
        contiguous = operator not in _PERMUTING and all(source.contiguous for source in sources)
        self.values.update(
            {name: Value(shape, dtype, memory_of, contiguous) for name, shape in zip(names, shapes, strict=True)}
        )
        return names

    def contiguous(self, name: str) -> str:
        """The value, or a copy of it that is contiguous."""
        value = self.values[name]
        if value.contiguous:
            return name
        keywords = (("memory_format", torch.contiguous_format),)
        copy = self.emit("aten.clone.default", name, shape=value.shape, dtype=value.dtype, keywords=keywords)
        self.values[copy] = Value(value.shape, value.dtype)
        return copy

    # -- making a value of a wanted shape ------------------------------------------------------------------------------

    def produce(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        """A value of this shape and dtype."""
        reusable = [name for name, v in self.values.items() if v.shape == shape and v.dtype == dtype]
        if reusable and self.chance(20):
            return str(self.pick(reusable))
        if depth == 0 or not self.chance(65):
            return self.new_input(shape, dtype)
        if not dtype.is_floating_point:
            return self._integer_binary(shape, dtype, depth)
        makers = [self._unary, self._binary, self._cast]
        if shape and isinstance(shape[-1], int) and shape[-1] > 0:
            makers += [self._slice, self._reduction]
            makers += [self._cat] if shape[-1] % 2 == 0 else []
        if len(shape) >= 2:
            makers += [self._transposed]
        if len(shape) == 2 and isinstance(shape[-1], int) and shape[-1] > 0:
            makers += [self._matmul]
        name: str = self.pick(makers)(shape, dtype, depth - 1)
        return name

    def _unary(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        source = self.produce(shape, dtype, depth)
        return self.emit(f"aten.{self.pick(_UNARY)}.default", source, shape=shape, dtype=dtype)

    def _binary(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        left = self.produce(shape, dtype, depth)
        operator = self.pick(_BINARY)
        if not operator.startswith("maximum") and self.chance(25):
            return self.emit(f"aten.{operator}", left, self.pick((2.0, -0.5, 1.0)), shape=shape, dtype=dtype)
        other = shape[-1:] if len(shape) > 1 and self.chance(30) else shape
        return self.emit(f"aten.{operator}", left, self.produce(other, dtype, depth), shape=shape, dtype=dtype)

    def _integer_binary(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        operator = self.pick(_LOGICAL if dtype == torch.bool else ("add.Tensor", "bitwise_xor.Tensor", "sub.Tensor"))
        left, right = self.produce(shape, dtype, depth - 1), self.produce(shape, dtype, depth - 1)
        return self.emit(f"aten.{operator}", left, right, shape=shape, dtype=dtype)

    def _cast(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        source = self.produce(shape, self.pick([d for d in FLOATS if d != dtype]), depth)
        return self.emit("aten._to_copy.default", source, shape=shape, dtype=dtype, keywords=(("dtype", dtype),))

    def _slice(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        last = int(shape[-1])
        source = self.produce((*shape[:-1], last + 8), dtype, depth)
        start = self.pick((0, 8, 3))
        memory = self.values[source].memory_of
        return self.emit(
            "aten.slice.Tensor", source, -1, start, start + last, shape=shape, dtype=dtype, memory_of=memory
        )

    def _cat(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        half = (*shape[:-1], int(shape[-1]) // 2)
        parts = (self.produce(half, dtype, depth), self.produce(half, dtype, depth))
        return self.emit("aten.cat.default", parts, -1, shape=shape, dtype=dtype)

    def _transposed(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        source = self.produce((shape[1], shape[0], *shape[2:]), dtype, depth)
        memory = self.values[source].memory_of
        return self.emit("aten.transpose.int", source, 0, 1, shape=shape, dtype=dtype, memory_of=memory)

    def _reduction(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        source = self.produce((*shape, 4), dtype, depth)
        operator = self.pick(("sum.dim_IntList", "amax.default", "mean.dim"))
        return self.emit(f"aten.{operator}", source, (-1,), shape=shape, dtype=dtype)

    def _matmul(self, shape: tuple[Dim, ...], dtype: torch.dtype, depth: int) -> str:
        left, right = self.produce((shape[0], 16), dtype, depth), self.produce((16, shape[1]), dtype, 0)
        return self.emit("aten.mm.default", left, right, shape=shape, dtype=dtype)

    # -- using values that exist ---------------------------------------------------------------------------------------

    def latest(self) -> list[str]:
        """What is used next: the last two values as often as any."""
        names = list(self.values)
        return names[-2:] if self.chance(50) else names

    def consume(self) -> None:
        """One more step on some value, or an in-place write of an input."""
        name = str(self.pick(self.latest()))
        value = self.values[name]
        if not value.dtype.is_floating_point:
            self._consume_exactly(name, value)
            return
        options = ["unary", "binary"]
        options += ["transpose", "reduce"] if len(value.shape) >= 2 else []
        self._consume_floating(name, value, str(self.pick(options)))

    def _consume_floating(self, name: str, value: Value, what: str) -> None:
        shape, dtype = value.shape, value.dtype
        if what == "unary":
            self.emit(f"aten.{self.pick(_UNARY)}.default", name, shape=shape, dtype=dtype)
        elif what == "binary":
            self.emit(f"aten.{self.pick(_BINARY)}", name, self.produce(shape, dtype, 1), shape=shape, dtype=dtype)
        elif what == "transpose":
            swapped = (shape[1], shape[0], *shape[2:])
            self.emit("aten.transpose.int", name, 0, 1, shape=swapped, dtype=dtype, memory_of=value.memory_of)
        elif isinstance(shape[-1], int) and shape[-1] > 0:
            self.emit("aten.amax.default", name, (-1,), shape=shape[:-1], dtype=dtype)

    def _consume_exactly(self, name: str, value: Value) -> None:
        """What follows an integer is exact: its values are compared without tolerance."""
        shape, dtype = value.shape, value.dtype
        if dtype == torch.bool:  # as a number it may become anything further
            self.emit("aten._to_copy.default", name, shape=shape, dtype=torch.int32, keywords=(("dtype", torch.int32),))
            return
        what = self.pick(_EXACT)
        if what == "wider" and dtype != torch.int32:
            self.emit("aten._to_copy.default", name, shape=shape, dtype=torch.int32, keywords=(("dtype", torch.int32),))
        elif what in ("xor", "add"):
            operator = "bitwise_xor.Tensor" if what == "xor" else "add.Tensor"
            if len(shape) > 1 and self.chance(25):
                # The smaller operand first: its memory cannot hold the result.
                self.emit(f"aten.{operator}", self.produce(shape[-1:], dtype, 2), name, shape=shape, dtype=dtype)
                return
            other = name if self.chance(10) else self.produce(shape, dtype, 1)
            self.emit(f"aten.{operator}", name, other, shape=shape, dtype=dtype)
        elif what == "transpose" and len(shape) >= 2:
            swapped = (shape[1], shape[0], *shape[2:])
            self.emit("aten.transpose.int", name, 0, 1, shape=swapped, dtype=dtype, memory_of=value.memory_of)
        elif what == "mirror" and len(shape) == 2 and shape[0] == shape[1]:
            mirrored = self.emit("aten.transpose.int", name, 0, 1, shape=shape, dtype=dtype, memory_of=value.memory_of)
            self.emit("aten.sub.Tensor", name, mirrored, shape=shape, dtype=dtype)
        elif what == "copy":
            operator, *number = self.pick(_COPIES)
            memory = value.memory_of if operator == "aten.alias.default" else None
            copy = self.emit(operator, name, *number, shape=shape, dtype=dtype, memory_of=memory)
            if shape and self.chance(40):  # as `reshape` does with what it cannot view
                self._flat(copy, self.values[copy])
        elif what in _WITHIN and shape and isinstance(shape[-1], int) and shape[-1] > 1:
            self._reshaped(name, value, what)
        else:
            operator = "aten.neg.default" if what == "neg" else "aten.bitwise_not.default"
            self.emit(operator, name, shape=shape, dtype=dtype)

    def _reshaped(self, name: str, value: Value, what: str) -> None:
        """A part of a value, a concatenation with itself or another, or a view with one more dimension."""
        shape, dtype = value.shape, value.dtype
        last = int(shape[-1])
        if what == "slice":
            start = self.pick((0, 0, last // 2))
            stop = self.pick((last, start + max(1, (last - start) // 2)))
            part = (*shape[:-1], stop - start)
            self.emit("aten.slice.Tensor", name, -1, start, stop, shape=part, dtype=dtype, memory_of=value.memory_of)
        elif what == "difference":
            self._difference(name, value)
        elif what == "take":
            self._taken(name, value, self.pick((last, 1)))
        elif what == "flat":
            self._flat(name, value)
        else:
            other = self.produce(shape, dtype, 2)
            if self.chance(50):
                other = self.emit(
                    self.pick(("aten.neg.default", "aten.bitwise_not.default")), other, shape=shape, dtype=dtype
                )
            rows = shape[0]
            if isinstance(rows, int):
                self.emit("aten.cat.default", (other, name), 0, shape=(2 * rows, *shape[1:]), dtype=dtype)
            else:
                self.emit("aten.cat.default", (other, name), -1, shape=(*shape[:-1], 2 * last), dtype=dtype)

    def _flat(self, name: str, value: Value) -> None:
        """A view with one more dimension, the last one or the one before it."""
        dim = len(value.shape) - self.choices.number(0, 1)
        shape = (*value.shape[:dim], 1, *value.shape[dim:])
        self.emit("aten.unsqueeze.default", name, dim, shape=shape, dtype=value.dtype, memory_of=value.memory_of)

    def _difference(self, name: str, value: Value) -> None:
        """Of neighbours: rows, or the elements of a row where there may be one row only."""
        dim = 0 if isinstance(value.shape[0], int) and value.shape[0] > 1 else len(value.shape) - 1
        part = (*value.shape[:dim], int(value.shape[dim]) - 1, *value.shape[dim + 1 :])
        after, before = (
            self.emit(
                "aten.slice.Tensor", name, dim, start, start + int(part[dim]), shape=part, dtype=value.dtype,
                memory_of=value.memory_of,
            )
            for start in (1, 0)
        )  # fmt: skip
        self.emit("aten.sub.Tensor", after, before, shape=part, dtype=value.dtype)

    def _taken(self, name: str, value: Value, width: int) -> None:
        """Elements of the first few of a row, by an index, which takes some numbers only."""
        part = (*value.shape[:-1], width)
        row = self.emit(
            "aten.slice.Tensor", name, -1, 0, width, shape=part, dtype=value.dtype, memory_of=value.memory_of
        )
        count, seed = self.pick((2, 1, 5)), self.choices.number(0, 999)
        self.inputs.append(Input((count,), "int64", seed=seed, below=width))  # no value: nothing may write an index
        index = Ref(f"x{len(self.inputs) - 1}")
        self.emit("aten.index_select.default", row, -1, index, shape=(*part[:-1], count), dtype=value.dtype)

    def mutate(self, targets: list[str]) -> bool:
        """Write one of the named values in place; False when there is none."""
        if not targets:
            return False
        name = str(self.pick(targets))
        value = self.values[name]
        operator = self.pick(("add_.Tensor", "mul_.Tensor", "copy_.default"))
        if value.dtype == torch.bool:
            operator = "copy_.default"
        if not value.dtype.is_floating_point and operator == "mul_.Tensor":
            operator = "add_.Tensor"
        scalar = 2 if not value.dtype.is_floating_point else 0.5
        other: Any = (
            self.produce(value.shape, value.dtype, 1) if operator == "copy_.default" or self.chance(50) else scalar
        )
        if isinstance(other, str) and self.values[other].memory_of == value.memory_of:
            # Reading what is being written is undefined where the two overlap in part.
            other = self.emit("aten.clone.default", other, shape=value.shape, dtype=value.dtype)
        self.steps.append(Step(f"aten.{operator}", (Ref(name), Ref(other) if isinstance(other, str) else other)))
        return True

    def mutable(self) -> list[str]:
        """The values that are an input's memory, and so may be written."""
        return [name for name, value in self.values.items() if value.memory_of is not None]


def _names(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, str) for item in value)


def _flat(values: tuple[Any, ...]) -> list[Any]:
    return [leaf for value in values for leaf in (value if isinstance(value, tuple) else (value,))]
