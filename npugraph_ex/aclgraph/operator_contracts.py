"""Checks that operators of other libraries keep their contract: their fake function, and the aliases and writes of their schema.

The passes rely on these contracts. A broken one gives wrong values that no other check can see. So each such operator is
compared with its contract where a graph runs for the first time: at every capture, and at the first uncaptured run.

If an operator returns or writes an argument without declaring it, the graph is compiled again with that effect. A capture has
computed nothing yet, so it is dropped; a first run is undone (`first_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.errors import BrokenPromiseError
from npugraph_ex.graph import metadata
from npugraph_ex.graph.memory.aliases import named_arguments
from npugraph_ex.graph.operators import learn
from npugraph_ex.graph.sizes import has_symbols
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.undeclared import ANY_EFFECT, RELIES_ON_SCHEMAS, is_foreign, names_of_effects, writes_undeclared
from npugraph_ex.observe.logger import logger

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors with memory; fake tensors and other subclasses have none."""


class UndeclaredEffectError(BrokenPromiseError):
    """An operator wrote or returned an argument without declaring it. The graph can be compiled again with that effect.

    Attributes:
        operator: which one.
        arguments: their names in its schema.
    """

    def __init__(self, message: str, operator: OpOverload, arguments: frozenset[str]) -> None:
        super().__init__(message)
        self.operator = operator
        self.arguments = arguments

    def remember(self) -> None:
        """Record the operator's effect for all later compilations, and warn once in a process."""
        if learn(self.operator, self.arguments):
            logger.warning(
                "%s. From now on the library assumes that %s writes and returns %s, and compiles the graphs that call it again\n%s",
                self, self.operator, " and ".join(sorted(self.arguments)), self.address,
            )  # fmt: skip


class ContractInterpreter(fx.Interpreter):
    """Runs a graph node by node, and checks its foreign operators.

    Args:
        gm: the graph.
        is_original: whether no pass has changed it. Then an undeclared effect does no harm, and is only noted.
        stays: whether the graph cannot be compiled again. Then an operator may return memory of an argument, undeclared, as long
            as no later node writes that memory, and the graph lacks no write: it computes the same as with new memory.

    Attributes:
        found: the undeclared effects.

    Raises:
        UndeclaredEffectError: an operator wrote or returned an argument without declaring it.
        BrokenPromiseError: an operator breaks its contract in another way.
    """

    def __init__(self, gm: fx.GraphModule, *, is_original: bool = False, stays: bool = False) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # the messages already name the node
        self.found: list[UndeclaredEffectError] = []
        self._is_original = is_original
        self._stays = stays
        self._relies: Callable[[], frozenset[str]] = gm.meta.get(RELIES_ON_SCHEMAS, frozenset)
        # By storage: who returned it although it was an argument's. No other storage gets its key while the reference is kept.
        self._shared: dict[int, tuple[StorageWeakRef, UndeclaredEffectError]] = {}
        self._at: fx.Node | None = None

    @property
    def location(self) -> str:
        """The last operator and its source line, for a message."""
        if self._at is None:
            return "the graph"
        source = source_line(self._at)
        return f"{self._at.name} ({self._at.target})" + (f" at {source}" if source else "")

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and remember which one it is."""
        self._at = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; check a foreign one."""
        if self._shared and isinstance(target, OpOverload):
            for storage in _written_storages(target, args, kwargs) & self._shared.keys():
                raise self._shared[storage][1]
        given = _tensors((args, kwargs)) if is_foreign(target) else []
        if not given or any(type(tensor) not in _PLAIN for tensor in given):
            return super().call_function(target, args, kwargs)
        unwritten = _left_alone(target, args, kwargs)
        versions = {name: [tensor._version for tensor in tensors] for name, tensors in unwritten.items()}  # noqa: SLF001 - torch has no public name for it
        # Under a dispatch mode, such as AOT's around the first call, torch does not count the writes of a kernel.
        with _torch_private.unobserved_execution():
            result = super().call_function(target, args, kwargs)
        written = [
            name
            for name, tensors in unwritten.items()
            if versions[name] != [tensor._version for tensor in tensors]  # noqa: SLF001
        ]
        if written:
            self._note(
                target, written, "wrote to an argument that its schema does not declare as written",
                "declare it in mutates_args",
            )  # fmt: skip
        returned = _returned_undeclared(target, args, kwargs, _tensors(result))
        if returned:
            self._note(
                target, returned, "returned memory of an argument, undeclared", "return a clone",
                shared=_tensors(result),
            )  # fmt: skip
        if _share_memory(target, given, _tensors(result)):
            self._refuse("returned two results in one memory, undeclared", "return a clone")
        broken = "" if self._is_as_traced(given, result) else _difference(_declared(target, args, kwargs), result)
        if broken:
            self._refuse(broken, "correct the function given to register_fake")
        return result

    def _is_as_traced(self, given: Sequence[torch.Tensor], result: object) -> bool:
        """Whether the fake function said this result of tensors like these when it was traced; asking again takes milliseconds."""
        assert self._at is not None  # noqa: S101 - it is being run
        arguments = [
            leaf.meta.get("val")
            for leaf in pytree.tree_leaves((self._at.args, self._at.kwargs))
            if isinstance(leaf, fx.Node)
        ]
        fakes, said = _tensors(arguments), self._at.meta.get("val")
        if len(fakes) != len(given) or len(_tensors(said)) != len(_tensors(result)) or has_symbols([*arguments, said]):
            return False
        unlike = any(metadata.difference(fake, real) for fake, real in zip(fakes, given, strict=True))
        return not unlike and not _difference(said, result)

    def _refuse(self, what: str, remedy: str) -> None:
        raise BrokenPromiseError(self._message(what, remedy))

    def _note(
        self,
        target: OpOverload,
        arguments: Sequence[str],
        what: str,
        remedy: str,
        *,
        shared: Sequence[torch.Tensor] = (),
    ) -> None:
        effect = UndeclaredEffectError(self._message(what, remedy), target, frozenset(arguments))
        relied_on = {ANY_EFFECT, *names_of_effects(target, arguments)}
        harmless = self._stays and shared and relied_on.isdisjoint(self._relies())
        if not self._is_original and not harmless:
            raise effect
        if self._stays:
            for tensor in shared:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._shared[_torch_private.storage_key(tensor)] = reference, effect
        self.found.append(effect)

    def _message(self, what: str, remedy: str) -> str:
        return f"{self.location} {what}. The passes relied on the schema; {remedy}"


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _left_alone(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """By argument: the tensors that no known effect writes and whose writes torch counts."""
    theirs = _written_storages(target, args, kwargs)
    return {
        name: [t for t in _tensors(value) if not t.is_inference() and _torch_private.storage_key(t) not in theirs]
        for name, value in named_arguments(target, args, kwargs).items()
    }


def _written_storages(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The memory that an operator writes, by all that is known of it."""
    arguments = _torch_private.schema(target).arguments
    written = {a.name for a in arguments if (a.alias_info and a.alias_info.is_write) or writes_undeclared(target, a)}
    given = named_arguments(target, args, kwargs)
    return {_torch_private.storage_key(tensor) for name in written for tensor in _tensors(given.get(name))}


def _declared(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake function's results for these arguments; None if it needs the elements."""
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
        try:
            return target(*fakes[0], **fakes[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None


def _difference(declared: object, result: object) -> str:
    """The difference between a result's tensors and the declared ones; empty if there is none."""
    for fake, real in zip(_tensors(declared), _tensors(result), strict=False):
        for name, old, new in _facts(fake, real):
            if old != new:
                return f"returned a tensor {name} {new}, but its fake function says {old}"
    return ""


def _facts(fake: torch.Tensor, real: torch.Tensor) -> Iterator[tuple[str, object, object]]:
    yield "of shape", list(fake.shape), list(real.shape)
    yield "of", fake.dtype, real.dtype
    yield "on", fake.device, real.device
    if real.numel():
        strides = [list(_moving(tensor)) for tensor in (fake, real)]
        yield "with strides", strides[0], strides[1]


def _moving(tensor: torch.Tensor) -> Iterator[int]:
    """The strides that matter for the addresses of elements."""
    return (stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size != 1)


def _declares_aliases(target: OpOverload) -> bool:
    return any(returned.alias_info is not None for returned in _torch_private.schema(target).returns)


def _returned_undeclared(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[torch.Tensor]
) -> list[str]:
    """The arguments that share memory with a result although the schema declares it as new, except known cases."""
    if _declares_aliases(target):
        return []
    theirs = set(map(_torch_private.storage_key, results))
    given = named_arguments(target, args, kwargs)
    return [
        argument.name
        for argument in _torch_private.schema(target).arguments
        if not writes_undeclared(target, argument)
        and not theirs.isdisjoint(map(_torch_private.storage_key, _tensors(given.get(argument.name))))
    ]


def _share_memory(target: OpOverload, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    """Whether two results that the schema declares as new share memory that belongs to no argument."""
    theirs = set(map(_torch_private.storage_key, given))
    keys = [key for key in map(_torch_private.storage_key, results) if key not in theirs]
    return not _declares_aliases(target) and len(set(keys)) < len(keys)
