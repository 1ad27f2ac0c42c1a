"""The private parts of torch by which Dynamo's own result is kept: guards, and the code around the graph.

Apart from `_torch_private` because only `inference` uses them, and because torch calls this part of itself experimental.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.aot_compile import AOTCompiledFunction, aot_compile_fullgraph
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.exc import PackageError
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch._dynamo.package import SourceInfo

__all__ = ["Precompiled", "SerializableCallable", "precompile"]

CANNOT_BE_KEPT = (PackageError, OSError)
"""What torch raises for a function whose guards or source cannot be written down."""

Guard = Any  # torch's GuardFilterEntry


@contextlib.contextmanager
def _own_aot() -> Iterator[None]:
    """Torch keeps AOT's result itself while it precompiles, and knows how to keep Inductor's only; we keep our own."""
    import torch._functorch.config as settings

    names = (
        "strict_autograd_cache",
        "bypass_autograd_cache_key",
        "bundled_autograd_cache",
        "force_non_lazy_backward_lowering",
        "force_autograd_cache",
    )
    with settings.patch(dict.fromkeys(names, False)):
        yield


def serialisable(guard: Guard) -> bool:
    """Whether a guard can be written down and checked in another process: torch's own rule."""
    unsupported = CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    return not (
        guard.is_global
        or guard.guard_type in unsupported
        or any(kind in unsupported for kind in guard.derived_guard_types)
    )


class Precompiled:
    """One function as Dynamo compiled it, for one set of guards."""

    def __init__(self, function: AOTCompiledFunction) -> None:
        self._function = function

    def accepts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether its guards hold for a call."""
        return bool(self._function.guard_check(*args, **kwargs))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call it; its guards have been asked."""
        return self._function.fn(*args, **kwargs)

    def sources(self) -> list[tuple[str, int, int]]:
        """Module, first and last line (exclusive) of every function that was traced into."""
        return sorted((s.module, s.firstlineno, s.lastlineno) for s in self._function.source_info().inlined_sources)

    def imports(self) -> dict[str, str]:
        """The modules that guards and code speak of as globals, by the names that Dynamo gave them."""
        return dict(self._function._artifacts.runtime_env.import_sources)  # noqa: SLF001 - see above

    def save(self) -> bytes:
        """It as bytes, without the sources of the modules that it came from.

        Raises:
            Exception: of any kind that pickling may raise: it holds what has no meaning elsewhere.
        """
        artifacts = dataclasses.replace(self._function._artifacts, source_info=SourceInfo(inlined_sources=set()))  # noqa: SLF001 - see above
        light = AOTCompiledFunction(artifacts)
        return AOTCompiledFunction.serialize(light).serialized_data

    @classmethod
    def load(cls, data: bytes, function: Any) -> Precompiled:
        """Undo `save`, for the same function in this process: its globals, and what it closes over, are this one's."""
        loaded = AOTCompiledFunction.deserialize(data, f_globals=function.__globals__)
        artifacts = loaded._artifacts  # noqa: SLF001 - see above
        if function.__closure__:
            environment = dataclasses.replace(artifacts.runtime_env, closure=function.__closure__)
            artifacts = dataclasses.replace(artifacts, runtime_env=environment)
            loaded = AOTCompiledFunction(artifacts, _extra_globals=function.__globals__)
        return cls(loaded)


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
        args: what it is called with, without ``self``.
        kwargs: by keyword.
        backend: compiles the graph.
        dynamic: as in ``torch.compile``.
        keep_guards: says of each guard whether it is written down.
    """

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> SerializableCallable:
        with _own_aot():
            return backend(gm, example_inputs)

    # A float attribute is a constant with a guard: as an input it would have to be read on the host at every call.
    with torch._dynamo.config.patch(specialize_float=True):
        try:
            made = aot_compile_fullgraph(
                function,
                (tuple(args), dict(kwargs)),
                hooks=Hooks(guard_filter_fn=keep_guards),
                backend=compile_graph,
                dynamic=dynamic,
            )
        except AssertionError as error:
            if "backend_input must not be None" not in str(error):
                raise
            raise PackageError("it computes nothing with tensors, so there is no graph") from error
    return Precompiled(made)
