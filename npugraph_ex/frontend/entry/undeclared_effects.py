"""Graphs that only eager mode gets right, because AOT relied on the schema of an operator with an undeclared effect.

AOT turns a write into a new value that takes the old one's place. If an operator returned memory of an argument without declaring
it, a later write to that memory went elsewhere, and no compilation of AOT's graph can put it back. Such a Dynamo graph runs as it
was traced, operator by operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.first_run import LostWriteError
from npugraph_ex.errors import CaptureError, SavedGraphError, address_of
from npugraph_ex.frontend.upstream_repairs import shared_inputs
from npugraph_ex.graph.collectives import overloads_in
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.graph.undeclared import ANY_EFFECT, arguments_found, is_foreign, names_of_effects
from npugraph_ex.observe.logger import logger

if TYPE_CHECKING:
    from npugraph_ex.frontend.entry.compiler import CompiledFxGraph


class UndeclaredEffects:
    """What effects that no schema declares may have done to a Dynamo graph.

    Args:
        gm: the graph, before functionalisation.
        example_inputs: of a compilation.
        require_capture: raise instead of running the graph operator by operator.

    Attributes:
        operators: those that a user or another library registered; of no other can an effect be found.
        made: the compiled graphs, which are not saved if a write is lost.
    """

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, require_capture: bool) -> None:
        self.operators = overloads_in(gm, is_foreign)
        self.made: list[CompiledFxGraph] = []
        self._require_capture = require_capture
        if self.operators:
            self._gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))
            self._examples = shared_inputs.examples(gm, example_inputs)
            if any(isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) for value in self._examples):
                with _torch_private.as_fakes(self._examples) as fakes:
                    self._examples = fakes  # the compiled graph may live longer than real ones

    def lost_write(self) -> str:
        """Which write AOT loses for all that is known of the operators, in words; empty where it loses none."""
        lost = self._lost_for(arguments_found) if any(map(arguments_found, self.operators)) else {}
        return next(iter(lost.values()), "")

    def relies_on_schemas(self) -> frozenset[str]:
        """The effects with which AOT would lose a write: an operator that writes or returns an argument undeclared."""
        return frozenset(self._lost_for(_every_argument)) if self.operators else frozenset()

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: the metadata of a graph leads here, a client may copy a graph, and fake tensors have no copy."""
        return self

    def _lost_for(self, effects: Callable[[OpOverload], frozenset[str]]) -> dict[str, str]:
        """The lost writes in words, by the effects to blame."""
        try:
            with _torch_private.as_fakes(self._examples) as inputs:
                watcher = _Watcher(inputs, effects)
                with watcher:
                    self._gm(*inputs)
        except Exception as error:  # noqa: BLE001 - a graph that cannot be followed may have lost one
            return {ANY_EFFECT: f"no fake tensor can follow the graph ({type(error).__name__}), so a write may be lost"}
        return watcher.lost

    def warn(self, lost: str) -> None:
        """Say that a graph runs operator by operator.

        Raises:
            CaptureError: ``require_capture`` is set.
        """
        what = f"{lost}. Torch loses that write when it makes the graph functional"
        if self._require_capture:
            remedy = "declare the effect in the operator's schema"
            raise CaptureError(f"require_capture is set, and this graph cannot be captured: {what}; {remedy}")
        text = "%s, so it runs operator by operator, as in eager mode. Declare the effect in the schema\n%s"
        logger.warning(text, what, address_of("BrokenPromiseError"))

    def or_as_traced(self, compiled: Callable[..., Any], as_traced: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph until its first run finds that AOT lost a write; from then on the graph as it was traced.

        Args:
            compiled: raises `LostWriteError` before it has computed anything.
            as_traced: the graph operator by operator.
        """
        if not self.operators:
            return compiled
        function = compiled

        def run(*inputs: Any) -> Any:
            nonlocal function
            try:
                return function(*inputs)
            except LostWriteError as error:
                self.warn(str(error))
                function = as_traced
                for made in self.made:
                    made.never_saved(str(error))
                    made.compiled_again()
            return function(*inputs)

        def serialize() -> Any:
            lost = self.lost_write()
            if lost:
                raise SavedGraphError(f"this compiled graph cannot be saved: {lost}. Compile it in every process")
            return compiled.serialize()  # type: ignore[attr-defined]

        if hasattr(compiled, "serialize"):
            run.serialize = serialize  # type: ignore[attr-defined]
        return run


class _Watcher(TorchDispatchMode):
    """Looks for memory that an operator with undeclared effects shares, and that another operator writes as declared.

    A write after it is lost. So is one before it to memory of an input: torch writes the input at the end, and what the
    operator returned is not the input's memory.
    """

    def __init__(self, inputs: Sequence[Any], effects: Callable[[OpOverload], frozenset[str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lost: dict[str, str] = {}
        self._effects = effects
        self._inputs = {_torch_private.storage_key(tensor) for tensor in _tensors(inputs)}
        self._written: dict[int, OpOverload] = {}
        self._shared: dict[int, set[tuple[OpOverload, str]]] = {}
        self._alive: list[torch.Tensor] = []  # the address of a storage that died could be another's

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self._alive += _tensors(result)
        given = named_arguments(func, args, kwargs or {})
        for argument in _torch_private.schema(func).arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for key in _memory(given.get(argument.name)):
                    self._written[key] = func
                    for sharer, name in self._shared.get(key, ()):
                        self._lose(func, sharer, name)
        for name in self._effects(func):
            for key in _memory((given.get(name), result)):
                self._shared.setdefault(key, set()).add((func, name))
                if key in self._inputs and key in self._written:
                    self._lose(self._written[key], func, name)
        return result

    def _lose(self, writer: OpOverload, sharer: OpOverload, name: str) -> None:
        (effect,) = names_of_effects(sharer, [name])
        self.lost.setdefault(effect, f"{writer} writes memory that {sharer} writes or returns without declaring it")


def _every_argument(operator: OpOverload) -> frozenset[str]:
    """All that an operator of another library takes."""
    taken = _torch_private.schema(operator).arguments if is_foreign(operator) else ()
    return frozenset(argument.name for argument in taken)


def _memory(value: object) -> list[int]:
    return [_torch_private.storage_key(tensor) for tensor in _tensors(value)]


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
