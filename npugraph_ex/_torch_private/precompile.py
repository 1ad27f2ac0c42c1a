"""The private parts of torch that save Dynamo's own result: guards, and the code around the graph.

The package does not import it, because only `inference` uses it and torch calls this part experimental.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.aot_compile import AOTCompiledFunction, aot_compile_fullgraph, bind_locals
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.exc import PackageError
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch._dynamo.package import SourceInfo
from torch.utils._pytree import tree_map_only

from npugraph_ex.versions.aot_results import bytes_of, settings_of_precompilation
from npugraph_ex.versions.stale_global_state import no_earlier_state

__all__ = ["Precompiled", "SerializableCallable", "precompile"]

CANNOT_BE_KEPT = (PackageError, OSError)
"""Torch's exceptions for a function whose guards or source cannot be saved."""

Guard = Any  # torch's GuardFilterEntry

_SHAPES: Mapping[bool | None, Mapping[str, bool]] = {
    None: {},
    True: {"assume_static_by_default": False},
    False: {"assume_static_by_default": True, "automatic_dynamic_shapes": False},
}
"""What ``torch.compile(dynamic=)`` sets in Dynamo. Torch 2.10's `aot_compile_fullgraph` has no such argument."""


@contextlib.contextmanager
def _own_aot() -> Iterator[None]:
    """Keep our own compiled graph: during a precompilation torch keeps AOT's result itself, but it can save only Inductor's."""
    import torch._functorch.config as settings

    with settings.patch(dict.fromkeys(settings_of_precompilation(), False)):
        yield


@contextlib.contextmanager
def _without_gradients() -> Iterator[None]:
    """Save the guards on a tensor without its gradient, unless guards ask for that: torch saves a stand-in that it cannot load."""
    from torch._dynamo import guards as dynamo_guards

    pickler: Any = getattr(dynamo_guards, "GuardsStatePickler", None)
    if pickler is None:
        yield
        return
    original = pickler.reducer_override

    def reduced(self: Any, value: object) -> Any:
        found = original(self, value)
        gradient = value.grad if isinstance(value, torch.Tensor) and value.is_leaf else None
        if gradient is None or id(gradient) in self.guard_tree_values or not isinstance(found, tuple):
            return found
        function, arguments = found
        return function, tuple([None if argument is gradient else argument for argument in arguments])

    pickler.reducer_override = reduced
    try:
        yield
    finally:
        pickler.reducer_override = original


def serialisable(guard: Guard) -> bool:
    """Whether a guard can be saved and checked in another process, by torch's own rule."""
    unsupported = CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    return not (
        guard.is_global
        or guard.guard_type in unsupported
        or any(kind in unsupported for kind in guard.derived_guard_types)
    )


def argument_of_guard(guard: Guard) -> object:
    """The attribute or the key that a guard asks for; None for a guard on a value itself."""
    given = getattr(guard.orig_guard.create_fn, "keywords", None) or {}
    return given.get("attr", given.get("key"))


def _says_there_is_no_graph(error: AssertionError) -> bool:
    """Whether torch found no graph to compile; its assertion has a text since release 2.12."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    bare = not str(error) and last is not None and last.tb_frame.f_code is aot_compile_fullgraph.__code__
    return bare or "backend_input must not be None" in str(error)


def _without_tensors(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda _: None, value)


class Precompiled:
    """One function, compiled by Dynamo for one set of guards.

    Args:
        function: what torch made of it.
        f_globals: the function's globals. Torch copies those that the graph reads; each call reads them anew.
    """

    def __init__(self, function: AOTCompiledFunction, f_globals: dict[str, Any]) -> None:
        self._function = function
        self._globals = f_globals
        self._read = tuple(function._artifacts.runtime_env.used_globals.keys() & f_globals.keys())  # noqa: SLF001 - see above

    def locals_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, and what the function closes over, by the function's names."""
        artifacts = self._function._artifacts  # noqa: SLF001 - see above
        environment = artifacts.runtime_env
        cells = zip(environment.bytecode.co_freevars, environment.closure or (), strict=False)
        return {
            **{name: cell.cell_contents for name, cell in cells},
            **bind_locals(artifacts.signature, *args, **kwargs),
        }

    def accepts(self, f_locals: dict[str, Any]) -> bool:
        """Whether the guards that torch writes down hold for a call with these values."""
        guards = self._function._artifacts.guard_manager  # noqa: SLF001 - see above
        return guards is not None and bool(guards.check(f_locals))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it, without a check of its guards."""
        copies = self._function.fn.__globals__
        for name in self._read:
            copies[name] = self._globals[name]
        return self._function.fn(*args, **kwargs)

    def sources(self) -> list[tuple[str, int, int]]:
        """Module, first and last line (exclusive) of every function that was traced into."""
        return sorted((s.module, s.firstlineno, s.lastlineno) for s in self._function.source_info().inlined_sources)

    def imports(self) -> dict[str, str]:
        """The modules that guards and code use as globals, by Dynamo's names."""
        return dict(self._function._artifacts.runtime_env.import_sources)  # noqa: SLF001 - see above

    def save(self) -> bytes:
        """This object as bytes, without the sources of its modules.

        Nor are there tensors that are globals or closed over: `load` takes them from the function. Torch would copy their
        values as `torch.save` once did, of which torch_npu warns.

        Raises:
            Exception: of any kind that pickle raises: it contains an object that another process cannot use.
        """
        artifacts = self._function._artifacts  # noqa: SLF001 - see above
        environment = dataclasses.replace(
            artifacts.runtime_env,
            used_globals=_without_tensors(artifacts.runtime_env.used_globals),
            closure=tuple(
                types.CellType(_without_tensors(cell.cell_contents)) for cell in artifacts.runtime_env.closure or ()
            ),
        )
        light = dataclasses.replace(artifacts, runtime_env=environment, source_info=SourceInfo(inlined_sources=set()))
        return bytes_of(AOTCompiledFunction.serialize(AOTCompiledFunction(light)))

    @classmethod
    def load(cls, data: bytes, function: Any) -> Precompiled:
        """Undo `save` for the same function in this process, with this process's globals and closure."""
        loaded = AOTCompiledFunction.deserialize(data, f_globals=function.__globals__)
        artifacts = loaded._artifacts  # noqa: SLF001 - see above
        if function.__closure__:
            environment = dataclasses.replace(artifacts.runtime_env, closure=function.__closure__)
            artifacts = dataclasses.replace(artifacts, runtime_env=environment)
            loaded = AOTCompiledFunction(artifacts, _extra_globals=function.__globals__)
        made = cls(loaded, function.__globals__)
        # Torch keeps the globals of guards that it saves, and reads those of guards on shapes, too. Their shapes are asked apart.
        guards = loaded._artifacts.guard_manager  # noqa: SLF001 - see above
        if guards is not None and guards.global_scope is not None:
            for name in made._read:
                guards.global_scope["G"].setdefault(name, function.__globals__[name])
        return made


def precompile(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backend: Callable[..., SerializableCallable],
    dynamic: bool | None,
    keep_guards: Callable[[Sequence[Guard]], Sequence[bool]],
) -> Precompiled:
    """Compile ``function`` for a call like this one.

    Args:
        function: a function or bound method.
        args: the positional arguments, without ``self``.
        kwargs: the keyword arguments.
        backend: compiles the graph.
        dynamic: as in ``torch.compile``.
        keep_guards: tells for each guard whether it is saved.

    Raises:
        PackageError: the function cannot be precompiled.
    """
    plain = getattr(function, "__func__", function)
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
        if cell == types.CellType():  # torch would read it
            raise PackageError(f"it closes over {name!r}, which has no value")

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> SerializableCallable:
        with _own_aot():
            return backend(gm, example_inputs)

    # A float attribute is a constant with a guard, because as an input the host would have to read it at every call.
    settings = {"specialize_float": True, **_SHAPES[dynamic]}
    with torch._dynamo.config.patch(settings), no_earlier_state(), _without_gradients():
        try:
            made = aot_compile_fullgraph(
                function, (tuple(args), dict(kwargs)), hooks=Hooks(guard_filter_fn=keep_guards), backend=compile_graph
            )
        except AssertionError as error:
            if not _says_there_is_no_graph(error):
                raise
            raise PackageError("it computes nothing with tensors, so there is no graph") from error
    return Precompiled(made, plain.__globals__)
