"""What is wrong with the record of an operator: its signature, metadata, dtypes, and what it does on the emulated device.

Each function gives sentences, none where nothing is wrong. The library's own records and a user's pass the same checks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.operators import Call, Operator, UnsupportedArgumentError

_SHAKEN_RUNS = 4
NARROW = (torch.float16, torch.bfloat16, torch.float32)
STEPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 16, torch.complex64: 16}
"""How many steps of the dtype a result may be away: one rounding is half a step, and a float32 formula computes in float32."""


def faults(record: Operator) -> Iterator[str]:
    """All that is wrong; the record's operator must exist, and the emulated device be there."""
    for check in checks(record).values():
        yield from check()


def checks(record: Operator) -> dict[str, Callable[[], Iterator[str]]]:
    """What is checked of a record, by a few words about it; each check gives the faults that it finds."""
    if record.overload is None:
        told = f"there is no operator {record.name}; define it (torch.library.define), or import what defines it"
        return {"operator": lambda: iter([told])}
    examples = [*enumerate(record.calls(), 1)]
    return {
        "signature": partial(signature_faults, record),
        **{str(dtype): partial(_dtype_faults, record, dtype) for dtype in record.dtypes},
        **{
            f"dtype of example {number}": partial(_own_dtype_faults, record, example, number)
            for number, example in examples
        },
        **{f"example {number}": partial(_example_faults, record, example, number) for number, example in examples},
    }


def _dtype_faults(record: Operator, dtype: torch.dtype) -> Iterator[str]:
    """Distance from float64 and, of operators whose metadata somebody here writes, the metadata in this dtype."""
    yield from dtype_faults(record, dtype)
    if not record.is_vendors:
        for number, example in enumerate(record.calls(), 1):
            yield from (
                f"example {number} in {dtype}: {fault}" for fault in metadata_faults(record, _in_dtype(example, dtype))
            )


def _example_faults(record: Operator, example: Call, number: int) -> Iterator[str]:
    for fault in (*metadata_faults(record, example), *device_faults(record, example)):
        yield f"example {number}: {fault}"


def _own_dtype_faults(record: Operator, example: Call, number: int) -> Iterator[str]:
    """As `dtype_faults`, in the example's own dtype, if the record does not name that."""
    if _tensors(tuple(example)) and record.across_ranks is None and _dtype_of(example) not in record.dtypes:
        with suppress(UnsupportedArgumentError):  # a formula that takes no float64
            yield from example_faults(record, example, number)


def signature_faults(record: Operator) -> Iterator[str]:
    """Where names, order, defaults and keyword-only arguments of the formula and its twins are not those of the schema."""
    assert record.overload is not None
    schema = record.overload._schema.arguments
    wanted = [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty, a.kwarg_only) for a in schema
    ]
    for function in filter(None, (record.formula, record.before_rounding, record.constraints, record.work)):
        given = inspect.signature(function).parameters.values()
        found = [(p.name, p.default, p.kind is p.KEYWORD_ONLY) for p in given]
        if found != wanted:
            ours, theirs = next(
                (pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]), (found, wanted)
            )
            yield f"{function.__qualname__} has the arguments (name, default, keyword only) {ours}; the schema has {theirs}"


def has_meta(overload: torch._ops.OpOverload) -> bool:
    """Whether the operator's library tells the metadata of its results."""
    return _torch_private.has_meta_kernel(overload)


def metadata_faults(record: Operator, example: Call) -> Iterator[str]:
    """Where shapes, dtypes or strides of the results are not those of the operator's meta function."""
    assert record.overload is not None
    assert record.formula is not None
    if not has_meta(record.overload):
        return
    mode = FakeTensorMode()

    def as_fake(value: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")

    args, kwargs = pytree.tree_map_only(torch.Tensor, as_fake, tuple(example))
    with mode:
        expected = record.overload(*args, **kwargs)
    args, kwargs = copy.deepcopy((example.args, example.kwargs))
    sides = [
        [
            value if value is None else (tuple(value.shape), value.dtype, value.stride())
            for value in pytree.tree_leaves(side)
        ]
        for side in (record.formula(*args, **kwargs), expected)
    ]
    if sides[0] != sides[1]:
        yield f"the results (shape, dtype, strides) are {sides[0]}; the operator's meta function says {sides[1]}"


def dtype_faults(record: Operator, dtype: torch.dtype) -> Iterator[str]:
    """Where an example, in one dtype, is not close to the float64 run of the same formula on the same numbers."""
    for number, example in enumerate(record.calls(), 1):
        yield from example_faults(record, _in_dtype(example, dtype), number)


def example_faults(record: Operator, example: Call, number: int) -> Iterator[str]:
    """Where an example, in its own dtype, is not close to the float64 run."""
    draws, dtype = record.draws_random_numbers or (lambda *_, **__: False), _dtype_of(example)
    if not draws(*example.args, **example.kwargs):  # other dtypes draw other numbers
        try:
            _assert_close_to_float64(record, example, dtype)
        except AssertionError as error:
            yield f"example {number} in {dtype} is not close to float64: {' '.join(str(error).split())}"


def device_faults(record: Operator, example: Call) -> Iterator[str]:
    """What torch's opcheck finds on the device, and results there that are not the formula's.

    Nothing of an operator that communicates: it needs the other ranks.
    """
    if record.across_ranks is not None:
        return
    overload = record.overload
    assert overload is not None
    checks = [*(["test_schema"] if not record.writes else []), *(["test_faketensor"] if has_meta(overload) else [])]
    args, kwargs = on_device(record, example)
    if checks:
        outcome = torch.library.opcheck(overload, args, kwargs, test_utils=checks, raise_exception=False)
        yield from (f"opcheck's {check}: {said}" for check, said in outcome.items() if said != "SUCCESS")


def on_device(record: Operator, example: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example's arguments on the device, but for host arguments."""
    assert record.overload is not None
    names = [argument.name for argument in record.overload._schema.arguments]

    def moved(name: str, value: Any) -> Any:
        return value if name in record.host_arguments else pytree.tree_map_only(torch.Tensor, lambda t: t.npu(), value)

    args = tuple(moved(name, value) for name, value in zip(names, example.args, strict=False))
    return args, {name: moved(name, value) for name, value in example.kwargs.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _in_dtype(example: Call, dtype: torch.dtype) -> Call:
    """The example with its dtype replaced everywhere."""
    before = _dtype_of(example)
    return Call(*pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == before else t, tuple(example)))


def _dtype_of(example: Call) -> torch.dtype:
    """The dtype of the first floating tensor, else of the first tensor."""
    given = _tensors(tuple(example))
    return next((tensor for tensor in given if tensor.is_floating_point()), given[0]).dtype


def widened(example: Call) -> Call:
    """The same numbers in float64, complex ones in complex128."""
    wide = {**dict.fromkeys(NARROW, torch.float64), torch.complex64: torch.complex128}
    return Call(*pytree.tree_map_only(torch.Tensor, lambda t: t.to(wide.get(t.dtype, t.dtype)), tuple(example)))


def _results(function: Callable[..., Any], example: Call) -> list[torch.Tensor]:
    """What a formula returns and what it leaves in its arguments."""
    args, kwargs = copy.deepcopy((example.args, example.kwargs))
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        returned = function(*args, **kwargs)
    found = _tensors((returned, args, kwargs))
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in found]


def _exact(record: Operator, example: Call) -> Sequence[torch.Tensor]:
    """The float64 run: the value before rounding where the record has one."""
    assert record.formula is not None
    try:
        return _results(record.before_rounding or record.formula, widened(example))
    except UnsupportedArgumentError:  # packed results have no value before rounding
        return _results(record.formula, widened(example))


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest finite magnitude among floating-point tensors; 0 where there is none."""
    finite = (tensor[tensor.isfinite()].abs() for tensor in tensors if tensor.is_floating_point())
    return max((float(tensor.max()) for tensor in finite if tensor.numel()), default=0.0)


def _shaken(record: Operator, example: Call, dtype: torch.dtype) -> Iterator[Sequence[torch.Tensor]]:
    """The float64 run for arguments that are off by up to a step of their dtype, a few times."""
    off, generator = torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps, torch.Generator()
    for seed in range(_SHAKEN_RUNS):
        generator.manual_seed(seed)

        def shaken(value: torch.Tensor) -> torch.Tensor:
            if value.dtype != dtype or not value.is_floating_point():
                return value
            wide = value.double()
            return wide * (1 + off * (2 * torch.rand(wide.shape, dtype=wide.dtype, generator=generator) - 1))

        yield _exact(record, Call(*pytree.tree_map_only(torch.Tensor, shaken, tuple(example))))


def _assert_close_to_float64(record: Operator, example: Call, dtype: torch.dtype) -> None:
    """Floating results within about a rounding; whole numbers equal, or the nearest to the value before rounding.

    What cancels leaves a larger relative error, and what is steep one that grows with the argument. So results that are farther
    may be as far as arguments that are off by a step leave them in float64, and by steps of the largest argument.
    """
    assert record.formula is not None
    step = STEPS.get(dtype, 1) * torch.finfo(dtype if dtype.is_floating_point else torch.float32).eps
    exact = _exact(record, example)
    for place, (found, expected) in enumerate(zip(_results(record.formula, example), exact, strict=True)):
        if found.is_floating_point():
            wide = expected.double()
            near = max(step, torch.finfo(found.dtype).eps)
            small = near / 32 * _largest([wide])
            try:
                torch.testing.assert_close(found.double(), wide, rtol=near, atol=small, equal_nan=True)
            except AssertionError:
                spread = (
                    torch.stack([run[place].double() - wide for run in _shaken(record, example, dtype)]).abs().amax(0)
                )
                allowed = near * (wide.abs() + _largest(_tensors(tuple(widened(example)))) / 4) + 2 * spread
                if not bool(((found.double() - wide).abs() <= allowed).all()):
                    raise
        elif expected.is_floating_point():
            limits = torch.iinfo(found.dtype)
            distance = (found.double() - expected.double().clamp(limits.min, limits.max)).abs().nan_to_num()
            if distance.numel() and distance.max() > 0.5 + step * limits.max:
                raise AssertionError(f"a whole number is {float(distance.max())} away from the value before rounding")
        elif not torch.equal(found, expected):
            raise AssertionError(f"{found.tolist()} are not the float64 run's {expected.tolist()}")
