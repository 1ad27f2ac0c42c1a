"""The private parts of torch that this library uses, one thin named function each.

Nothing else in the library reaches behind an underscore of torch: when torch moves, this is the file to mend.
"""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen


def debug_directory() -> Path:
    """Where this process writes under TORCH_COMPILE_DEBUG=1.

    Dynamo and Inductor choose ``torch_compile_debug/run_<time>-pid_<pid>`` once a process; our dumps belong beside
    theirs, and there is no public question for it.
    """
    from torch._dynamo.utils import get_debug_dir

    return Path(get_debug_dir())


def provenance_fields() -> tuple[str, ...]:
    """The ``node.meta`` keys that say where a node came from, which torch's own rewriters carry over."""
    from torch.fx.proxy import _COPY_META_FIELDS

    return ("stack_trace", *_COPY_META_FIELDS)


def schema(overload: OpOverload) -> torch.FunctionSchema:
    """The schema of an operator: the only place where torch states defaults, aliasing and writes."""
    return overload._schema


def is_erased(node: fx.Node) -> bool:
    """Whether ``node`` was erased from its graph by an edit that happened since it was looked up."""
    return bool(node._erased)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share a storage; works on fake tensors.

    ``data_ptr`` is not available on fake tensors, and storages themselves are not hashable by identity.
    """
    return int(tensor.untyped_storage()._cdata)


def auto_functionalized_operators() -> tuple[object, ...]:
    """The two wrappers behind which AOT hides a custom operator that mutates: themselves they write nothing."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

    return (auto_functionalized, auto_functionalized_v2)


@contextmanager
def fake_execution(mode: FakeTensorMode | None) -> Iterator[None]:
    """Run operators as tracing does: under ``mode`` and with the Python dispatcher, which symbolic shapes need."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode if mode is not None else nullcontext(), enable_python_dispatcher(), torch.no_grad():
        yield


@contextmanager
def real_execution() -> Iterator[None]:
    """Compute real values inside a compilation, where torch.compile has a fake mode in force around its backend."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def codegen_of(graph: fx.Graph) -> CodeGen:
    """How ``graph`` prints its signature; ``set_codegen`` is public, asking for it is not."""
    return graph._codegen


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many owners a storage has, Python objects and tensors alike.

    The only way to learn whether a caller still holds any view of a result; reference counts of Python objects do not
    see views.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


def static_input_positions() -> tuple[int, ...]:
    """The positions of the inputs of the graph being compiled whose address AOT knows to be stable: parameters, buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(metadata.static_input_indices) if metadata is not None else ()


def has_device_kernel(operator: torch._ops.OpOverload) -> bool:
    """Whether the NPU's dispatch key has a kernel of its own for an operator, rather than a fallback to the CPU.

    The dispatcher is asked, not the device; torch has no public question for it.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "PrivateUse1")


def call_unwrapped(wrapper: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Do what an ``auto_functionalized`` wrapper stands for: copy what is mutated, call the operator, return the copies."""
    from torch._higher_order_ops import auto_functionalize as module

    if wrapper is module.auto_functionalized_v2:
        return module.auto_functionalized_v2_dense(*args, **kwargs)  # type: ignore[arg-type]
    return module.auto_functionalized_dense(*args, **kwargs)  # type: ignore[arg-type]


@contextmanager
def sound_aot(inputs: Sequence[object]) -> Iterator[None]:
    """Settings under which AOT's own handling of aliased outputs is right.

    AOT makes an output that views an input anew after each call. With its default, torch 2.13 replays the views on the
    wrong base when inputs alias each other and one of them is written: wrong elements, or a failed assertion. The other
    way, by strides, has no such fault, but cannot tell that a view reinterprets the dtype; so it serves aliased inputs only.
    """
    import torch._functorch.config as settings

    storages = [storage_key(value) for value in inputs if isinstance(value, torch.Tensor)]
    with settings.patch(view_replay_for_aliased_outputs=len(set(storages)) == len(storages)):
        yield


def dynamo_input_names(gm: fx.GraphModule) -> list[str]:
    """What the user calls each input of a Dynamo graph, such as ``L['x']`` or ``L['self'].weight``, by position."""
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        text = str(name() if callable(name) else name or node.target)
        # Dynamo spells an attribute of a module by the dictionary that holds it.
        names.append(re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text))
    return names


def aot_input_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a placeholder of the AOT graph is; None where AOT made it up."""
    return getattr(node.meta.get("desc"), "idx", None)
