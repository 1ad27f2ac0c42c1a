"""Strangers' programs as kinds of items: torch's own database of operators against eager mode.

The examples were written by others, who did not know what the library finds easy. A difference that `aot_eager`, torch's backend
without any compiler, has as well is not this library's: the item passes, and its value says so.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer

_SAMPLES = 12
"""Of an operator's samples so many are looked at, of which the first two and the last run."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.int32, torch.complex64)
UPSTREAM = "aot_eager does the same: "
_Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
_Made = Callable[[_Compile], Callable[..., Any]]
"""Makes a program of a sample's input, arguments and named arguments, given a way to compile what may be compiled of it."""


class OperatorCase(NamedTuple):
    """One item: an operator of the database, a dtype, fixed or symbolic sizes."""

    position: int
    dtype: torch.dtype
    dynamic: bool


@cache
def database() -> Sequence[Any]:
    """Torch's database of operators, without what puts a random state around some of them: Dynamo cannot trace it."""
    from torch.testing._internal import common_methods_invocations as found

    found.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)  # `_difference` sets the state
    return tuple(found.op_db)


def operator_cases(_settings: CampaignSettings) -> list[OperatorCase]:
    """Every operator in every dtype that the CPU takes; all operators in one dtype first, so that a part says something of all."""
    return [
        OperatorCase(position, dtype, dynamic)
        for dtype in _DTYPES
        for dynamic in (False, True)
        for position, operator in enumerate(database())
        if dtype in operator.supported_dtypes("cpu")
    ]


def check_operator(_settings: CampaignSettings, case: OperatorCase) -> ItemAnswer:
    """The operator's samples, as a function, in place, into ``out`` and with gradients, compiled and called twice."""
    operator = database()[case.position]
    name = f"{operator.name}{f'.{operator.variant_test_name}' if operator.variant_test_name else ''}"
    label = f"{name} {str(case.dtype).removeprefix('torch.')} {'dynamic' if case.dynamic else 'static'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)  # samples are drawn from it
        samples = list(itertools.islice(operator.sample_inputs_func(operator, "cpu", case.dtype, False), _SAMPLES))
        ran, upstream = 0, []
        for number, sample in enumerate([*samples[:2], *samples[2:][-1:]]):
            for form, function in _forms(operator, sample, case.dtype, is_first=not number):
                found = _difference(function, sample, dynamic=case.dynamic)
                if found is None:
                    continue
                ran += 1
                if found.startswith(UPSTREAM):
                    upstream.append(f"{form}{found.removeprefix(UPSTREAM)}")
                elif found:
                    return ItemAnswer(f"sample {number}: {form}{found}", [f"ran {name}"], label)
    if not ran:
        return ItemAnswer(label=label, skipped="eager mode on the device refuses every sample")
    return ItemAnswer(features=[f"ran {name}"], label=label, value={"ran": ran, "upstream": upstream[:1]})


def _forms(operator: Any, sample: Any, dtype: torch.dtype, *, is_first: bool) -> Iterator[tuple[str, _Made]]:
    """The programs of a sample, each with its name; ``out`` and gradients of the first sample alone."""
    yield "", _plain(operator.op)
    if operator.inplace_variant is not None:
        yield "in place: ", _plain(operator.inplace_variant)
    if is_first and operator.supports_out:
        yield "out: ", partial(_into_out, operator.op, sample)
    if is_first and operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu"):
        yield "gradients: ", partial(_with_gradients, operator.op)


def _plain(function: Callable[..., Any]) -> _Made:
    def made(compiled: _Compile) -> Callable[..., Any]:
        return compiled(lambda value, args, kwargs: function(value, *args, **kwargs))

    return made


def _into_out(function: Callable[..., Any], sample: Any, compiled: _Compile) -> Callable[..., Any]:
    """The operator with ``out``: memory of the right shape with other numbers in it."""
    results = pytree.tree_map_only(torch.Tensor, torch.ones_like, function(sample.input, *sample.args, **sample.kwargs))
    fast = compiled(lambda value, args, kwargs, out: function(value, *args, out=out, **kwargs))

    def call(value: Any, args: Any, kwargs: Any) -> Any:
        out = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone().npu(), results)
        return fast(value, args, kwargs, out), out

    return call


def _with_gradients(function: Callable[..., Any], compiled: _Compile) -> Callable[..., Any]:
    """The operator, and the gradients of its real and complex arguments for gradients of ones."""
    fast = _plain(function)(compiled)

    def call(value: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((value, args, kwargs)) if isinstance(leaf, torch.Tensor)]
        leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        results = fast(value, args, kwargs)
        ends = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return results, torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)

    return call


def _difference(made: _Made, sample: Any, *, dynamic: bool) -> str | None:
    """What differs from eager mode; nothing where nothing does, None where eager mode refuses the call."""

    def call(called: Callable[..., Any]) -> Any:
        """Results, and the arguments after the call, from new copies and the same random numbers."""
        given = pytree.tree_map(_on_the_device, (sample.input, sample.args, sample.kwargs))
        torch.manual_seed(3)
        return called(*given), given

    def compiled(backend: str) -> Iterator[Any]:
        torch.compiler.reset()
        fast = made(partial(torch.compile, backend=backend, dynamic=dynamic or None))
        for _ in range(2):
            yield call(fast)

    try:
        expected = call(made(lambda program: program))
    except Exception:  # noqa: BLE001 - what eager mode does not take says nothing about a compiler
        return None
    ours = _answers(compiled("npugraph_ex"))
    found = ours if isinstance(ours, str) else next(filter(None, (unlike(expected, call) for call in ours)), "")
    if not found or unlike(expected, call(made(lambda program: program))):
        return ""  # eager mode is not like itself where memory is not written
    return f"{UPSTREAM}{found}" if _is_same(ours, _answers(compiled("aot_eager"))) else found


def _answers(calls: Iterator[Any]) -> list[Any] | str:
    try:
        return list(calls)
    except Exception as error:  # noqa: BLE001 - an exception is a difference, too
        return f"raised {type(error).__name__}: {str(error)[:300]}"


def _is_same(ours: list[Any] | str, theirs: list[Any] | str) -> bool:
    """Whether two backends gave the same results, or raised an exception of the same type."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return str(ours).partition(":")[0] == str(theirs).partition(":")[0]
    return not any(map(unlike, theirs, ours))


def _on_the_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().npu()
    return "npu" if isinstance(value, (str, torch.device)) and str(value) == "cpu" else value


def unlike(expected: Any, found: Any) -> str:
    """How two calls differ: dtype, shape, strides, bits of dense tensors; other results by their values."""
    pairs = [pytree.tree_leaves(expected), pytree.tree_leaves(found)]
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[1])} results and arguments instead of {len(pairs[0])}"
    for old, new in zip(*pairs, strict=True):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            same = type(old) is type(new) and (isinstance(old, torch.Tensor) or old == new or old != old)  # noqa: PLR0124 - NaN
            if not same:
                return f"{new!r} instead of {old!r}"
            continue
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return f"{new.dtype} {tuple(new.shape)} instead of {old.dtype} {tuple(old.shape)}"
        if old.layout != torch.strided:
            continue
        if old.numel() > 1 and 1 not in old.shape and old.stride() != new.stride():
            return f"strides {new.stride()} instead of {old.stride()}"
        values = [value.cpu().resolve_conj().resolve_neg() for value in (old, new)]
        if old.is_complex():
            values = [torch.view_as_real(value) for value in values]
        if not torch.equal(*(value.nan_to_num(nan=7.125) if value.is_floating_point() else value for value in values)):
            return f"other values{_how_far(*values)}"
    return ""


def _how_far(old: torch.Tensor, new: torch.Tensor) -> str:
    """Whether they differ by rounding."""
    if not old.is_floating_point() or not old.isfinite().all():
        return ""
    units = (old.double() - new.double()).abs().max() / old.double().abs().max() / torch.finfo(old.dtype).eps
    return f": {float(units):.1g} units of the largest's last place"
