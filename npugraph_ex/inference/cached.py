"""`CachedFunction`: what `cache_compile` returns. It finds, makes, keeps and calls the compilations of one function."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx
from typing_extensions import Self

from npugraph_ex._garbage_collection import no_collection
from npugraph_ex._own_files import default_directory
from npugraph_ex._torch_private import precompile as _torch_precompile
from npugraph_ex._torch_private.precompile import Precompiled, precompile
from npugraph_ex.aclgraph import compile_graph
from npugraph_ex.cache.key import digest, key_parts
from npugraph_ex.cache.source_files import files_of
from npugraph_ex.cache.store import SUFFIX, CacheEntry, Store, read_entry
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat, given_or_default
from npugraph_ex.errors import NpuGraphExError, SavedGraphError, address_of
from npugraph_ex.frontend.entry import current_device
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.compiler import CompiledFxGraph
from npugraph_ex.inference.assumptions import Assumptions, conditions_in, outdated
from npugraph_ex.inference.conditions import Conditions
from npugraph_ex.observe.logger import logger
from npugraph_ex.saving.artifact import SavedGraph
from npugraph_ex.saving.values import Unsaveable

Refused = tuple[Path, str]
"""A saved compilation that is not used, and why."""


class KeptGraph(_torch_precompile.SerializableCallable):
    """The graph inside a compiled function: as AOT made it in the process that compiled, from its text in any other.

    Attributes:
        text: None where it has none.
        unsaved: why not.
        device: the one that was current at the compilation; None where no result depends on it.
        keep_again: writes the compilation down anew, once it has been.
    """

    device: int | None = None
    keep_again: Callable[[], object] | None = None

    def __init__(self, run: Callable[..., Any], text: str | None, unsaved: str = "") -> None:
        self._run = run
        self.text = text
        self.unsaved = unsaved

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        return self._run(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> bytes:
        """The graph as text."""
        if fn.text is None:
            raise Unsaveable(fn.unsaved)
        text: str = fn.text
        return text.encode()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Self:
        """The graph from its text."""
        text = data.decode()
        return cls(SavedGraph.read(text).load(compile_graph), text)


@dataclass(frozen=True, eq=False)
class _Variant:
    """One compilation, and what torch's own guards leave out.

    Attributes:
        compiled: by Dynamo.
        conditions: on globals, classes and functions.
        device: the one that must be current; None for any.
    """

    compiled: Precompiled
    conditions: Conditions
    device: int | None

    def accepts(self, bound: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether it was made for such a call."""
        if self.device not in {None, torch.accelerator.current_device_index()}:
            return False
        f_locals = self.compiled.locals_of(bound, kwargs)
        return self.compiled.accepts(f_locals) and self.conditions.hold(f_locals)


class CachedFunction:
    """A function whose compilations are kept on disk; call it like the function.

    Args:
        function: the function itself.
        owner: what it is bound to; None for a plain function.
        config: the options.
        store: where files are kept.
        base: the beginning of their names, which says everything but the inputs.
        parts: what the key is made of.
        dynamic: as in ``torch.compile``.
        decompositions: as in ``get_npu_backend``.
    """

    def __init__(  # noqa: PLR0913 - the parts of one declaration
        self,
        function: FunctionType,
        owner: object,
        config: CompilerConfig,
        *,
        store: Store,
        base: str,
        parts: Mapping[str, str],
        dynamic: bool,
        decompositions: Mapping[Any, Callable[..., Any]] | None,
    ) -> None:
        self.__wrapped__ = function
        self._bound = () if owner is None else (owner,)
        self._config = config
        self._store = store
        self._base = base
        self._parts = parts
        self._dynamic = dynamic
        self._decompositions = decompositions
        self._variants: list[_Variant] = []
        self._fallback: Callable[..., Any] | None = None
        self._unread: list[Path] | None = None
        self._refused: list[Refused] = []  # saved compilations that no longer hold, since the last one was made
        self._lock = threading.RLock()

    @classmethod
    def from_function(  # noqa: PLR0913 - the arguments of `cache_compile`
        cls,
        func: Callable[..., Any],
        *,
        config: CompilerConfig | None,
        options: Mapping[str, object] | None,
        dynamic: bool,
        directory: str | Path | None,
        given_ranks: Mapping[str, int | None],
        decompositions: Mapping[Any, Callable[..., Any]] | None,
        fullgraph: bool,
    ) -> Self:
        """See `npugraph_ex.inference.cache_compile`."""
        function = func.__func__ if isinstance(func, MethodType) else func
        if not isinstance(function, FunctionType):
            raise NpuGraphExError(f"cache_compile takes a function or a method such as model.forward, got {func!r}")
        if not fullgraph:
            raise NpuGraphExError(
                "cache_compile keeps one graph, so fullgraph=False is not possible; use torch.compile"
            )
        chosen = copy.deepcopy(given_or_default(config, "cache_compile: config"))  # the caller's stays as it is
        apply_flat(chosen, dict(options or {}))
        owner = func.__self__ if isinstance(func, MethodType) else None
        files_of([function.__module__, type(owner).__module__])  # as they are now, before somebody edits them
        ranks = _ranks(given_ranks)
        parts = key_parts(
            chosen.to_options().changed(),
            function=function,
            owner=type(owner),
            dynamic=dynamic,
            ranks=ranks,
            decompositions={str(operator): how for operator, how in (decompositions or {}).items()},
        )
        return cls(
            function,
            owner,
            chosen,
            store=Store(directory),
            base=f"{_name(function, owner, ranks)}-{digest(parts)[:16]}",
            parts=parts,
            dynamic=dynamic,
            decompositions=decompositions,
        )

    def __getstate__(self) -> dict[str, object]:
        """Hold nothing that is written down: torch pickles the module whose attribute this may be, for its guards."""
        return {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled."""
        bound = (*self._bound, *args)
        with torch.no_grad():
            for number, variant in enumerate(self._variants):
                if variant.accepts(bound, kwargs):
                    if number:
                        self._ask_first(variant)
                    return variant.compiled.run(bound, kwargs)
            if self._fallback is not None:
                return self._fallback(*bound, **kwargs)
            return self._find_or_make(bound, args, kwargs)

    def _ask_first(self, variant: _Variant) -> None:
        """Move a compilation to the front: to find that another one's globals have changed takes long."""
        with self._lock:
            self._variants.remove(variant)
            self._variants.insert(0, variant)

    def _find_or_make(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:
            if self._unread is None:
                self._unread = self._store.variants(self._base)
            found = next(
                (v for v in itertools.chain(tuple(self._variants), self._saved()) if v.accepts(bound, kwargs)), None
            )
            # Not a word of them where another file serves the call: that one is not stale.
            if found is None and self._refused:
                said = _refusals_message(self._refused, self._store, self._base)
                logger.warning("%s\n%s", said, address_of("SavedGraphError"))
                self._refused.clear()
            made = found or self._make(args, kwargs)
        if made is None:
            assert self._fallback is not None  # noqa: S101 - `_make` returns None only after setting it
            return self._fallback(*bound, **kwargs)
        return made.compiled.run(bound, kwargs)

    def _saved(self) -> Iterator[_Variant]:
        """The saved compilations that still hold, each read when it is asked for; those that do not go to the refused ones."""
        while self._unread:
            path = self._unread.pop(0)
            try:
                yield self._take(read_entry(path))
            except (SavedGraphError, OSError) as error:
                self._refused.append((path, str(error)))

    def _take(self, entry: CacheEntry) -> _Variant:
        reason = outdated(entry.header, self.__wrapped__.__globals__, self._fixed())
        if reason is not None:
            raise SavedGraphError(reason)
        try:
            with no_collection():  # what is read is much and lives on
                loaded = Precompiled.load(entry.payload, self.__wrapped__)
        except SavedGraphError:
            raise
        except Exception as error:
            raise SavedGraphError(f"it cannot be read here: {type(error).__name__}: {error}") from error
        device = entry.header["current_device"]
        conditions = conditions_in(entry.header, self.__wrapped__.__globals__)
        self._variants.append(_Variant(loaded, conditions, int(device) if device else None))
        return self._variants[-1]

    def _fixed(self) -> dict[str, object]:
        """What is the same in every call, by the name that the function has for it."""
        code = self.__wrapped__.__code__
        cells = zip(code.co_freevars, self.__wrapped__.__closure__ or (), strict=True)
        bound = zip(code.co_varnames, self._bound, strict=False)
        return {**dict(bound), **{name: cell.cell_contents for name, cell in cells if cell != CellType()}}

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Variant | None:
        """Compile for a call, and keep it; None where torch cannot write such a function down."""
        assumptions = Assumptions()
        function = MethodType(self.__wrapped__, *self._bound) if self._bound else self.__wrapped__
        graphs: list[KeptGraph] = []

        def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> KeptGraph:
            assumptions.follow_operators(gm)
            return self._compile(gm, inputs, graphs)

        try:
            made = precompile(
                function, args, kwargs,
                backend=compile_graph, dynamic=self._dynamic, keep_guards=assumptions.keep_guards,
            )  # fmt: skip
        except Exception as error:
            # With a graph there, what fails is writing guards down: torch pickles what a call gives, classes included.
            if not graphs and not isinstance(error, _torch_precompile.CANNOT_BE_KEPT):
                raise
            logger.warning(
                "%s is compiled in every process, because it cannot be kept: %s\n%s",
                self._base,
                _method_of_an_instance(error, self._bound) or _in_a_line(error),
                address_of("SavedGraphError"),
            )
            backend = get_npu_backend(compiler_config=self._config, custom_decompositions=self._decompositions)
            self._fallback = torch.compile(self.__wrapped__, backend=backend, dynamic=self._dynamic, fullgraph=True)
            return None
        variant = _Variant(made, assumptions.conditions(made, self.__wrapped__.__globals__), graphs[0].device)
        self._variants.append(variant)
        path = self._keep(variant, assumptions, graphs)

        def keep_again() -> None:
            if path is not None:
                path.unlink(missing_ok=True)
            self._keep(variant, assumptions, graphs)

        graphs[0].keep_again = keep_again
        return variant

    def _compile(self, gm: fx.GraphModule, inputs: list[Any], graphs: list[KeptGraph]) -> KeptGraph:
        compiled: list[CompiledFxGraph] = []
        device = int(torch.accelerator.current_device_index()) if current_device.decides(gm.graph) else None
        backend = get_npu_backend(
            compiler_config=self._config, custom_decompositions=self._decompositions, on_compiled=compiled.append
        )
        run = backend(gm, inputs)
        if len(compiled) == 1:
            (graph,) = compiled
            kept = KeptGraph(run, graph.get_code(guarded=True), graph.unsaved)
            graph.changed = partial(_keep_again, graph, kept)
            graphs.append(kept)
        else:
            graphs.append(KeptGraph(run, None, "it uses streams or events that are objects of this process"))
        graphs[-1].device = device
        return graphs[-1]

    def _keep(self, made: _Variant, assumptions: Assumptions, graphs: list[KeptGraph]) -> Path | None:
        """Write a compilation down; where that is not possible, say so and go on."""
        try:
            payload = made.compiled.save()
            text = graphs[0].text or ""
            device = "" if made.device is None else str(made.device)
            taken = {**assumptions.header(made.compiled, self._fixed()), "current_device": device}
            header = {**self._parts, **taken, "graph_length": str(len(text.encode()))}
            return self._store.write(f"{self._base}-{_signature(text, taken, assumptions.compared)}", header, payload)
        except OSError as error:
            logger.warning(
                "The compilation of %s is not kept: %s\n%s",
                self._base,
                _in_a_line(error),
                address_of("SavedGraphError"),
            )
        except Exception as error:  # noqa: BLE001 - pickling what a user's function holds may raise anything
            logger.warning(
                "The compilation of %s is not kept, and made in every process: %s\n%s",
                self._base,
                _in_a_line(error),
                address_of("SavedGraphError"),
            )
        return None


def _keep_again(graph: CompiledFxGraph, kept: KeptGraph) -> None:
    """Bring the text of a graph that was compiled again to where it is kept."""
    kept.text = graph.get_code(guarded=True)
    if kept.keep_again is not None:
        kept.keep_again()


def _in_a_line(error: Exception) -> str:
    """What an exception says, without line breaks; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def _method_of_an_instance(error: Exception, bound: tuple[Any, ...]) -> str:
    """The method whose name pickle looked for in vain, because somebody put it on an instance; empty for other errors."""
    modules = [module for one in bound if isinstance(one, torch.nn.Module) for module in one.modules()]
    for owner, name, held in ((module, *item) for module in modules for item in vars(module).items()):
        function = getattr(held, "__func__", None)
        if isinstance(function, FunctionType) and f"no attribute '{function.__name__}'" in str(error):
            kind, code = type(owner).__qualname__, function.__code__
            where = f"{function.__name__}, {code.co_filename}:{code.co_firstlineno}"
            return f"{name} ({where}) is a method of one {kind} only; define it in the class, as {kind}.{name}"
    return ""


def _refusals_message(refused: Sequence[Refused], store: Store, base: str) -> str:
    """One sentence for all files that are not used, however many one edit has made stale, and how to be rid of them."""
    found = Counter(reason.rstrip(".").replace(str(path), "\0") for path, reason in refused)
    if len(found) == 1:
        reasons = next(iter(found)).replace("\0", "it" if len(refused) == 1 else "each")
    else:
        reasons = ", ".join(f"{count} because {reason}".replace("\0", "it") for reason, count in found.items())
    if len(refused) == 1:
        what = f"The saved compilation {refused[0][0]} is not used and made anew"
    else:
        what = f"{len(refused)} saved compilations of {base} in {store.directory} are not used and made anew"
    folder = "" if store.directory == default_directory() else f"--dir {shlex.quote(str(store.directory))} "
    names = " ".join(path.name.removesuffix(SUFFIX) for path, _ in refused)
    return (
        f"{what}: {reasons}. `npugraph-ex cache {folder}clear {names}` deletes {'it' if len(refused) == 1 else 'them'}"
    )


def _signature(text: str, header: Mapping[str, str], compared: Sequence[str]) -> str:
    """A graph, what it takes for granted and what is compared at a call, as a short name.

    Two processes that compile the same write the same file, and one graph for two kinds of arguments has two files.
    """
    parts = [text, json.dumps(dict(header), sort_keys=True), *compared]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _name(function: FunctionType, owner: object, ranks: Mapping[str, int]) -> str:
    """The readable beginning of a file's name."""
    whole = function.__qualname__ if owner is None else f"{type(owner).__qualname__}.{function.__name__}"
    plain = re.sub(r"[^\w.]+", "_", whole)
    return plain + "".join(f"-{kind}{rank}" for kind, rank in ranks.items())


def _ranks(given: Mapping[str, int | None]) -> dict[str, int]:
    """The ranks that tell this process's compilation from another's."""
    ranks = {kind: rank for kind, rank in given.items() if rank is not None}
    distributed = torch.distributed
    if "world" not in ranks and distributed.is_available() and distributed.is_initialized():
        ranks["world"] = distributed.get_rank()
    return ranks
