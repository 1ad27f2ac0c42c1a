"""The modes in which operators run during a compilation: fake, real, or hidden from other modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from npugraph_ex.versions.rotary_layout import with_true_layout


@contextmanager
def unmeasured_guards() -> Iterator[None]:
    """Let Dynamo not time new guards in the block: it empties the processor's caches for that, a quarter of a small compilation."""
    import torch._dynamo.guards

    guards: Any = torch._dynamo.guards
    measure = guards.profile_guard_manager
    guards.profile_guard_manager = lambda *_: 0.0
    try:
        yield
    finally:
        guards.profile_guard_manager = measure


@contextmanager
def fake_execution(mode: FakeTensorMode | None, *, symbolic: bool = True) -> Iterator[None]:
    """Run operators as a trace does: under ``mode``, and with the Python dispatcher, in which AOT runs its backend, if symbolic."""
    from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher

    dispatcher = enable_python_dispatcher() if symbolic else no_python_dispatcher()
    with mode if mode is not None else nullcontext(), dispatcher, torch.no_grad():
        yield


def run_meta_kernel(mode: FakeTensorMode, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results of ``operator`` for fake tensors of ``mode``, from its meta kernel only; call it under ``fake_execution``.

    The mode would try its cache, decompositions and rules first, which takes many times longer with the same result. The mode
    runs only if it knows more: for several devices or a device argument, for writes (whose result is an argument), for fake
    functions of clients (which may read devices), and if the kernel fails, for example because the result depends on
    elements.
    """
    devices = {leaf.fake_device for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, FakeTensor)}
    has_explicit_device = (
        operator._schema.is_mutable or kwargs.get("device") is not None or _has_fake_function(operator)
    )
    if has_explicit_device or len(devices) != 1:
        return operator(*args, **kwargs)
    (device,) = devices
    try:
        with in_kernel_invocation_manager(mode):
            results = with_true_layout(operator, operator(*args, **kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda result: fake_of_meta(mode, result, device), results)
    except Exception:  # noqa: BLE001 - the mode answers, or says better what is wrong
        return operator(*args, **kwargs)


def _has_fake_function(operator: OpOverload) -> bool:
    """Whether ``torch.library.register_fake`` gave it one, which would see the meta device in a plain meta kernel."""
    from torch._library.simple_registry import singleton

    return operator.namespace != "aten" and singleton.find(operator.name()).fake_impl.kernel is not None


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """An operator's arguments, flat: they are nested in lists at most, and ``pytree`` takes ten times as long."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument


def on_meta_tensors(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """In the block, fake tensors of ``mode`` and the results of their operators are tensors of the meta device."""
    return in_kernel_invocation_manager(mode)


def fake_of_meta(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> FakeTensor:
    """A tensor on the meta device as a fake tensor on ``device``, in the same memory."""
    return FakeTensor(mode, value, device)


def fresh_fake(mode: FakeTensorMode, value: torch.Tensor, device: torch.device | None = None) -> FakeTensor:
    """A new fake tensor of ``mode`` with the shape, strides, dtype and device of ``value``, in new memory; or on ``device``."""
    shape, stride, storage = value.shape, value.stride(), value.untyped_storage().nbytes()
    with in_kernel_invocation_manager(mode):
        if isinstance(storage, int):
            new = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        else:  # which ``empty_strided`` would compute again, from every symbol
            new = torch.empty(storage // value.element_size(), dtype=value.dtype, device="meta").as_strided(
                shape, stride
            )
    return fake_of_meta(mode, new, device or value.device)


UNKNOWN_TO_FAKE_TENSORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""The exceptions of fake tensors if a result's shape is known only at run time."""


NEEDS_VALUES = (*exceptions_allowed_to_be_fallback, GuardOnDataDependentSymNode)
"""The exceptions of what asks fake tensors for more than they have. Raised by a backend, Dynamo runs the graph in eager mode."""


def active_fake_mode() -> FakeTensorMode | None:
    """The innermost fake mode that is in force."""
    from torch._guards import active_fake_mode as active

    return active()


def fake_modes_of(gm: fx.GraphModule) -> list[FakeTensorMode]:
    """The fake modes of a compilation by Dynamo that goes on: its own, and the one that its backend gets."""
    from torch._guards import detect_fake_mode

    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    modes = (*(value.fake_mode for value in values if isinstance(value, FakeTensor)), detect_fake_mode())
    return list({id(mode): mode for mode in modes if mode is not None}.values())


def forget_real_tensors(mode: FakeTensorMode) -> None:
    """Let a mode forget which real tensors it converted: `torch.utils.swap_tensors` refuses one with a weak reference."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


@contextmanager
def unobserved_execution() -> Iterator[None]:
    """Run operators that the program did not call, hidden from the dispatch modes around the compiled function.

    AOT runs the first call under a mode that checks the aliasing of custom operators. It may check the program's operators,
    but the library calls ``.out`` forms instead, which return their output arguments.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def outside_first_call_mode() -> AbstractContextManager[Any]:
    """Leave, in the block, the mode by which AOT watches custom operators in the first call, if it is the innermost."""
    if not dispatch_modes():
        return nullcontext()
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

    watched = type(_get_current_dispatch_mode()).__name__ == "_AnalyzeCustomOpInputOutputMode"
    return _pop_mode_temporarily() if watched else nullcontext()


def calls_go_to(handler: Callable[..., Any]) -> AbstractContextManager[Any]:
    """In the block, each operator that reaches the devices is given to ``handler``: its overload, arguments and keywords."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, overload: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(overload, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]


@contextmanager
def real_execution() -> Iterator[None]:
    """Compute real values inside a compilation, where AOT runs its backend under a fake mode and the Python dispatcher."""
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), no_python_dispatcher():
        yield


def forget_fake_results() -> None:
    """Make factories create fake tensors on the present current device.

    Torch 2.13 caches the results of fake operators by their arguments, and `device="npu"` is one argument for all devices.
    """
    FakeTensorMode.cache_clear()


def outside_compilation() -> AbstractContextManager[Any]:
    """Within the block, traces know nothing of the compilation that is running."""
    from torch._guards import tracing

    return tracing(None)


def compiling_alone() -> AbstractContextManager[object]:
    """Within the block no other thread compiles; Dynamo calls a backend so."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextmanager
def as_compilation() -> Iterator[None]:
    """Within the block a trace counts as a compilation, as those of Dynamo do, and no other thread compiles.

    Otherwise torch takes it for one of ``fx.symbolic_trace``, in all threads, and calls of compiled functions are errors meanwhile.
    What says that something is compiled or traced belongs to the process, so two threads would leave it as the other found it.
    """
    with compiling_alone():
        before = torch.compiler._is_compiling_flag  # noqa: SLF001 - as Dynamo sets it, and nothing public does
        torch.compiler._is_compiling_flag = True  # noqa: SLF001
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before  # noqa: SLF001


@contextmanager
def as_fakes(inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Within the block what runs is fake, also with real weights; the inputs as new fake tensors over the memory that they have."""
    from torch._guards import detect_fake_mode

    # On torch 2.10 the tracing context of a backend has another mode than the examples that it is given.
    own = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    mode = own or detect_fake_mode() or FakeTensorMode()
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with fake_execution(mode):
            fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            yield [value.detach() if isinstance(value, torch.Tensor) else value for value in fakes]
    finally:
        mode.allow_non_fake_inputs = allowed


def in_one_fake_mode(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as tensors of the active fake mode, if there is one; AOT refuses tensors of another mode."""
    from torch._guards import detect_fake_mode

    try:
        mode = detect_fake_mode()
    except AssertionError:
        mode = None  # several are active; AOT's error names them
    if mode is None:
        return list(inputs)
    return [
        mode.from_tensor(value) if isinstance(value, FakeTensor) and value.fake_mode is not mode else value
        for value in inputs
    ]


# Torch's own functions without a wrapper, because sessions ask them at each call.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # noqa: SLF001 - see the package's first lines
"""How many function modes of Python are in force; a default device is one."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - likewise
"""How many dispatch modes of Python are in force."""


def dual_levels() -> int:
    """How many blocks of `torch.autograd.forward_ad.dual_level` are in force."""
    return int(forward_ad._current_level) + 1  # noqa: SLF001 - see the package's first lines
