"""The private parts of torch that this library uses, one thin named function each.

Nothing else in the library reaches behind an underscore of torch: when torch moves, this is the file to mend.
"""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree


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


def scoped_library(namespace: str) -> AbstractContextManager[torch.library.Library]:
    """A library that defines operators until the block ends, when they are gone."""
    return torch.library._scoped_library(namespace, "DEF")


def is_erased(node: fx.Node) -> bool:
    """Whether ``node`` was erased from its graph by an edit that happened since it was looked up."""
    return bool(node._erased)


def is_of_backward(node: fx.Node) -> bool:
    """Whether AOT traced ``node`` of a joint graph in the backward; its partitioner goes by the same mark."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


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


def run_meta_kernel(mode: FakeTensorMode, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``operator`` returns for fake tensors of ``mode`` without symbolic sizes, by its meta kernel alone.

    The mode would ask its cache, decompositions and rules first, which takes many times longer and answers the same. It is
    asked where it knows more: where an operator is told the device, and for writes, whose result is an argument.
    """
    if operator._schema.is_mutable or kwargs.get("device") is not None:
        return operator(*args, **kwargs)
    device = next(leaf.fake_device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    with in_kernel_invocation_manager(mode):
        results = operator(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, lambda result: fake_of_meta(mode, result, device), results)


def fake_of_meta(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> FakeTensor:
    """A tensor on the meta device as a fake tensor on ``device``, in the same memory."""
    return FakeTensor(mode, value, device)


UNKNOWN_TO_FAKE_TENSORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What fake tensors raise where only running an operator would tell its result's shape."""


def active_fake_mode() -> FakeTensorMode | None:
    """The innermost fake mode that is in force."""
    from torch._guards import active_fake_mode as active

    return active()


@contextmanager
def unobserved_execution() -> Iterator[None]:
    """Run operators that the program did not call, hidden from the dispatch modes around the compiled function.

    AOT runs the first call under a mode that holds custom operators to their schema's aliasing. It may judge the
    program's operators; the ``.out`` forms that the library calls in their place return what they are given to write.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
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


def lazy_graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when it is first called, not whenever its graph changes."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def storage_handle(storage: torch.UntypedStorage) -> int:
    """What `owners_of_storage` calls a storage; valid as long as the storage object lives."""
    return int(storage._cdata)


owners_of_storage: Callable[[int], int] = torch._C._storage_Use_Count
"""How many owners a storage has, Python objects and tensors alike.

The only way to learn whether a caller still holds any view of a result; reference counts of Python objects do not see
views. It is asked at every call, so it is torch's own function without a wrapper.
"""


def static_input_positions() -> tuple[int, ...]:
    """The positions of the inputs of the graph being compiled whose address AOT knows to be stable: parameters, buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(metadata.static_input_indices) if metadata is not None else ()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def boxed(function: _Function) -> _Function:
    """Mark a function that takes its arguments in one list, so that AOT passes it the list that it has."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


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


def inputs_written_afterwards(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that AOT writes when the graph has run, with values that the graph returns."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = next(iter(graph.find_nodes(op="output"))).meta.get("desc") or ()
    written = [result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)]
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def operator_name(overload: OpOverload) -> tuple[str, str, str]:
    """Namespace, name and overload, as in ``torch.ops.aten.add.Tensor``."""
    return overload.namespace, overload._opname, overload._overloadname


def is_plain_aot_graph(graph: fx.Graph) -> bool:
    """Whether inputs and outputs of an AOT graph are, one by one, those of the function that AOT was given.

    Otherwise AOT's own wrapper takes inputs apart or puts outputs together, and the graph is not all of the function. A
    graph that does not come from AOT has no such wrapper.
    """
    from torch._functorch._aot_autograd import descriptors

    inputs = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    outputs = next(iter(graph.find_nodes(op="output"))).meta.get("desc")
    if outputs is None and not any(inputs):
        return True
    return all(
        isinstance(found, descriptors.PlainAOTInput) and found.idx == position for position, found in enumerate(inputs)
    ) and all(
        isinstance(found, descriptors.PlainAOTOutput) and found.idx == position
        for position, found in enumerate(outputs or ())
    )


def input_guards(inputs: Sequence[object], mode: FakeTensorMode | None) -> str:
    """What the sizes of a graph's inputs must fulfil, as an expression over ``L['t0']``, ``L['t1']`` and so on."""
    environment = mode.shape_env if mode is not None else None
    if environment is None:
        return ""
    checked = [value for value in inputs if isinstance(value, (torch.Tensor, torch.SymInt))]
    return environment.produce_guards_expression(checked, ignore_static=True) or ""  # type: ignore[arg-type]


def guard_names() -> dict[str, object]:
    """The functions that an expression of ``input_guards`` may call."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return dict(SYMPY_INTERP)


def new_symbols(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """A fake mode of its own, and in it one free symbol (of sympy) for each name, with its value in the example inputs."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    symbols = {
        name: environment.create_symbol(
            hint, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        for name, hint in hints.items()
    }
    return FakeTensorMode(shape_env=environment), symbols


def symbolic_size(mode: FakeTensorMode, expression: Any, hint: int) -> int | torch.SymInt:
    """A size that is an expression (of sympy) over symbols of ``mode``."""
    environment: Any = mode.shape_env
    size: int | torch.SymInt = environment.create_symintnode(expression, hint=hint)
    return size


def size_functions() -> dict[str, Any]:
    """The functions that the spelling of a symbolic size may call, such as ``CeilDiv``."""
    from torch.utils._sympy import functions

    return {name: getattr(functions, name) for name in functions.__all__}


def in_one_fake_mode(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as tensors of the fake mode that is in force, if one is; AOT refuses those of another."""
    from torch._guards import detect_fake_mode

    try:
        mode = detect_fake_mode()
    except AssertionError:
        mode = None  # several are in force; AOT says which
    if mode is None:
        return list(inputs)
    return [
        mode.from_tensor(value) if isinstance(value, FakeTensor) and value.fake_mode is not mode else value
        for value in inputs
    ]


CURRENT_STREAM = 0
"""The number that Dynamo gives the stream which is current where a compiled function is called."""


def traced_object(number: int) -> Any:
    """The stream or event object that Dynamo knows under a number: while it compiles, and at the start of each call."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return get_external_object_by_index(number)


def set_current_stream(stream: object) -> None:
    """Say which object Dynamo's operators on streams take for the current stream, during one call."""
    from torch._dynamo.graph_bytecode_inputs import set_external_object_by_index

    set_external_object_by_index(CURRENT_STREAM, stream)


def was_made_while_tracing(number: int) -> bool:
    """Whether the compiled function makes the object itself, rather than getting it from the code around it."""
    from torch._dynamo import graph_bytecode_inputs as table

    thing = table.get_external_object_by_index(number)
    return any(thing is made for made in table.keep_alive)


def fetches_traced_object(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph does nothing but fetch a stream or event object."""
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    return node.target is get_external_object_by_index


def trace_as_constant_call(module: str, name: str) -> None:
    """Let Dynamo trace ``torch.<module>.<name>()`` as an object that the code around the graph fetches at each call.

    torch_npu does so for `current_stream` and forgot `default_stream`; what is registered already stays.
    """
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, ImportSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    function = getattr(getattr(torch, module), name)

    def handle(self: object, tx: Any, *args: Any, **kwargs: Any) -> Any:
        del self, args, kwargs
        source = CallFunctionNoArgsSource(AttrSource(AttrSource(ImportSource("torch"), module), name))
        return VariableTracker.build(tx, function(), source)

    TorchInGraphFunctionVariable._get_handlers().setdefault(function, handle)


def functional_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """What AOT's functionalization holds as the present value of a tensor that is no view; None for any other tensor."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor) or not torch._is_functional_tensor_base(tensor.elem):
        return None
    tensor.sync()
    return torch._from_functional_tensor(tensor.elem)


def replace_functional_value(tensor: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
    """Give a tensor of which `functional_value` knows a value another one."""
    from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode

    assert isinstance(tensor, FunctionalTensor)  # noqa: S101 - for the type checker
    with disable_functional_mode():
        value = compute()
    tensor.replace_(value)
    tensor.commit_update()
    tensor.sync()
