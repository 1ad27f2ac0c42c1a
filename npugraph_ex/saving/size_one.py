"""Whether a graph that was traced for sizes of two and more is also right where such a size is one.

Torch specialises sizes of zero and one, so a symbolic size has the condition ``2 <= s``. vLLM drops torch's guards and calls the
graph with a batch of one as well; its models promise that their Python code does not branch on it. Operators may still do
something else at one: ``squeeze`` gives another shape, ``contiguous`` a view instead of a copy. So the traced graph runs twice
on fake tensors, once with symbols and once at size one. It is right at one if each value has the shape that its expression
gives there, and if memory that is written or returned is shared as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex import _torch_private
from npugraph_ex.graph.metadata import quiet_refusals
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.graph.undeclared import writes_undeclared
from npugraph_ex.observe.logger import logger
from npugraph_ex.saving.inputs import encode_inputs, fake_inputs, hints_of
from npugraph_ex.saving.sizes import NumericSizes, SymbolicSizes
from npugraph_ex.saving.values import Json, Unsaveable

_MOST_SYMBOLS = 3
"""With more symbolic sizes, their combinations are too many to try."""


class AtSizeOne:
    """The question for one graph. It is answered when somebody asks, because an answer takes two runs on fake tensors.

    Args:
        traced: the graph before any pass: Dynamo's, or AOT's if there is no other.
        examples: its inputs; fake, with symbolic sizes.
    """

    def __init__(self, traced: fx.GraphModule, examples: Sequence[Any]) -> None:
        self._traced = traced
        try:  # the examples themselves are not kept, because they may be large
            self._hints = hints_of(examples)
            self._spelt = encode_inputs(examples, [str(place) for place in range(len(examples))])
        except Unsaveable:
            self._hints, self._spelt = {}, []

    @functools.cached_property
    def is_right(self) -> bool:
        """Whether the graph does the same where one or more of its symbolic sizes are one."""
        if not 0 < len(self._hints) <= _MOST_SYMBOLS:
            return False
        every = [ones for count in range(1, len(self._hints) + 1) for ones in combinations(self._hints, count)]
        try:
            with quiet_refusals():
                sizes = SymbolicSizes(self._hints)
                symbolic = _FakeRun(self._traced, self._spelt, sizes)
                return all(
                    symbolic.agrees(
                        _FakeRun(self._traced, self._spelt, NumericSizes({**self._hints, **dict.fromkeys(ones, 1)})),
                        partial(sizes.value, ones=ones),
                    )
                    for ones in every
                )
        except Exception as error:  # noqa: BLE001 - whatever an operator raises at size one
            logger.debug("A graph is for sizes of two and more, because at one: %s", error)
            return False


class _FakeRun(fx.Interpreter):
    """One run of the graph on fake tensors: what each node gave, and which storages were written or returned."""

    def __init__(self, traced: fx.GraphModule, spelt: Sequence[Json], sizes: SymbolicSizes) -> None:
        super().__init__(traced, garbage_collect_values=False)  # a freed storage's name could come back
        self._mode = sizes.mode
        self._given: list[Any] = []
        writes = _WrittenStorages()
        with _torch_private.real_execution():
            inputs = fake_inputs(spelt, sizes, torch.device("npu", int(torch.npu.current_device())))
            with _torch_private.fake_execution(self._mode, symbolic=self._mode.shape_env is not None), writes:
                returned = self.run(*inputs)
        self._counting = writes.storages | set(_storages(pytree.tree_leaves(returned)))

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and keep what it gave."""
        result = super().run_node(n)
        self._given.extend(pytree.tree_leaves(result))
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant of the graph, as a fake tensor."""
        value = super().get_attr(target, args, kwargs)
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._mode.from_tensor(value, static_shapes=True) if real else value

    def agrees(self, at_one: _FakeRun, value: Callable[[Any], Any]) -> bool:
        """Whether the run ``at_one`` gave what this one gives there; ``value`` is the number of a symbolic size there."""
        if len(self._given) != len(at_one._given):
            return False
        if list(map(partial(_described, value=value), self._given)) != list(
            map(partial(_described, value=value), at_one._given)
        ):
            return False
        pairs = list(zip(_storages(self._given), _storages(at_one._given), strict=True))
        names: dict[int, int] = {}
        others: dict[int, int] = {}
        return all(
            names.setdefault(mine, its) == its and others.setdefault(its, mine) == mine
            for mine, its in pairs
            if mine in self._counting or its in at_one._counting
        )


class _WrittenStorages(TorchDispatchMode):
    """Collects the storages that operators write."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator."""
        del types
        if isinstance(func, OpOverload):
            given = named_arguments(func, args, kwargs or {})
            for argument in _torch_private.schema(func).arguments:
                declared = argument.alias_info is not None and argument.alias_info.is_write
                if declared or writes_undeclared(func, argument):
                    self.storages.update(_storages(pytree.tree_leaves(given.get(argument.name))))
        return func(*args, **(kwargs or {}))


def _storages(values: Sequence[Any]) -> list[int]:
    return [_torch_private.storage_key(value) for value in values if isinstance(value, torch.Tensor)]


def _described(leaf: Any, value: Callable[[Any], Any]) -> object:
    """A tensor's type, sizes, and strides where they count; a number by its value; other values by their type."""
    if isinstance(leaf, torch.Tensor):
        sizes = [value(size) for size in leaf.size()]
        strides = [value(step) for step, size in zip(leaf.stride(), sizes, strict=True) if size != 1]
        return leaf.dtype, leaf.device, sizes, strides, value(leaf.storage_offset())
    if isinstance(leaf, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value(leaf)
    return type(leaf)
