"""Examples about the caller of a captured graph: what it passes, what it keeps, and what it does between two calls.

A random integer program is called many times, eagerly and compiled, by the same caller. The caller passes tensors that are new,
that stay (some get other memory, by `x.data = y`), that begin elsewhere in one storage, or that are earlier results. It keeps
results as tensors, as views or as their storages alone, writes into what it keeps, drops some of it, and frees some memory. After
each step everything that both sides keep is compared.
Some callers call in inference mode, and some in turns with and without it. Some programs write a value through a view of it.
Some callers pass all arguments but one in the same memory at every call. Some press Ctrl-C in a call, whose results nobody gets,
and go on. Some make two calls one after the other on two streams, and wait for neither. Some call what was saved and loaded again.
Every third caller has an emulated device that runs queued work in a random order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import npu_emulator
import npugraph_ex
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import Input, alias_of, make_inputs
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex.testing.oracle.observation import Observation, host_copy, observe, visible_difference
from npugraph_ex_conformance.examples.called_programs import (
    READ,
    BothForms,
    both_forms,
    drawn_program,
    returned_names,
    with_more,
)
from npugraph_ex_conformance.examples.interrupts import interrupted

_CALLS = 16
_PATIENT, _PATIENT_CALLS = 30, 20
"""The chance that all arguments but one stay, and for how many calls: what stays is then read in place, beside what does not."""
_WRITTEN, _DROPPED, _FORGOTTEN = 30, 35, 5
"""Chances in percent: that between two calls something kept is written, that each kept thing is dropped, that all captures are."""
_TURNED = 15
"""The chance that a program that goes through Dynamo first turns an argument in place, under another name, and writes it."""
_SWAPPED = 8
"""The chance that an argument that stays gets other memory (`x.data = y`)."""
_STOPPED, _POINTS = 10, (30, 300, 3000)
"""The chance of Ctrl-C before a call, and before which point of the library's code it comes: of a replay, or of a capture."""
_ASIDE = 12
"""The chance that before a call another one is made on a side stream, whose results are read after both."""
_FREED = 8
"""The chance that between two calls a kept result loses its memory."""
_HABITS = (
    ("stays",) * 20 + ("new",),
    ("new", "moves", "result"),
    ("stays", "moves", "result", "result", "new"),
    ("moves",) * 3 + ("stays",) * 3,
)
"""How an argument is passed, each as likely as named. The caller has one of these habits for each argument."""
_HABITS_IN_TURNS = tuple(tuple(how for how in habit if how != "result") for habit in _HABITS)
"""Without results: what a call in inference mode returns must not be written without it."""
_Mode = Callable[[], AbstractContextManager[Any]]
_MODES: tuple[tuple[_Mode, ...], ...] = (
    (torch.no_grad,),
    (torch.inference_mode,),
    (torch.no_grad, torch.inference_mode),
)
_EVERY_TENSOR_MAY_BE_WRITTEN = torch.inference_mode
_KEEPINGS = ("storage", "tensor", "view", "data", "nothing")
_MOST_KINDS_OF_CALLS = 64
"""More than a caller makes: for Dynamo each way in which arguments share memory is another kind."""
_OFFSETS = (0, 0, 1, 128)
"""The last one is the allocator's step, so that new memory may begin where an argument of an earlier call did."""


TORCH_FAILS = ("sources must not be empty for symbol", "as_strided() is non-compositional")
"""Words of errors that torch raises for some callers with its own backend, too."""


def caller_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    return wrong_with(seed, Case.of(called_program(seed)))


def called_program(seed: int) -> Program:
    """The program of one example."""
    program = drawn_program(Choices(Sampled(f"caller {seed}")))
    return with_more(Choices(Sampled(f"view {seed}")), program)


def wrong_with(seed: int, case: Case) -> str:
    """What is wrong where the caller of example ``seed`` calls another program, and how it was compiled; empty when nothing is."""
    # What the caller does is drawn apart from the program, so that another form of program leaves it as it is.
    choices, modes = Choices(Sampled(f"calls {seed}")), Choices(Sampled(f"mode {seed}")).pick(_MODES)
    stops, patience = Choices(Sampled(f"interrupt {seed}")), Choices(Sampled(f"patience {seed}"))
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_KINDS_OF_CALLS), _order(seed):
            forms = both_forms(choices, case, turned=Choices(Sampled(f"turned {seed}")).chance(_TURNED))
            wrong = _difference(case, forms, choices, modes, stops, patience)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return "" if any(words in str(error) for words in TORCH_FAILS) else f"raised {type(error).__name__}: {error}"
    return wrong and f"{wrong}; compiled by {forms.how}"


def _order(seed: int) -> AbstractContextManager[None]:
    if seed % 3 or not npu_emulator.is_active():
        return nullcontext()
    return npu_emulator.schedule(f"random:{seed}")


def _difference(
    program: Case, forms: BothForms, choices: Choices, modes: Sequence[_Mode], stops: Choices, patience: Choices
) -> str:
    """How the two sides come to differ; empty if they do not."""
    outputs = returned_names(program.source)
    own = forms.by_dynamo, forms.in_a_session, forms.twins
    eager, compiled = _Caller(forms.eager, *own), _Caller(forms.compiled, *own)
    modes = _MODES[0] if eager.in_a_session else modes
    habits = [choices.pick(_HABITS if len(modes) == 1 else _HABITS_IN_TURNS) for _ in program.inputs]
    # A functional copy has as much memory around it as what it is a copy of, so its storage depends on the passes.
    keeping = _KEEPINGS[1:] if program.functional and not eager.by_dynamo else _KEEPINGS
    for home in eager.twins.values():
        habits[home] = _HABITS[0]
    if READ in outputs:
        habits[0] = ("new", "new", "moves")  # so that it lies where another one lay, in a storage that begins elsewhere
    patient = patience.chance(_PATIENT)
    if patient:
        habits = [("stays",)] * len(habits)
        habits[patience.number(0, len(habits) - 1)] = ("new",)
    for call in range(_PATIENT_CALLS if patient else _CALLS):
        sizes = program.sizes[0] if patient else choices.pick(program.sizes)
        passings = [_Passing.drawn(choices, habit) for habit in habits]
        keepings = [choices.pick(keeping) for _ in outputs]
        results = _results_to_pass(eager, program, sizes, passings)
        if call and stops.chance(_STOPPED):
            others, at = make_inputs(program.inputs, sizes=sizes), stops.number(1, stops.pick(_POINTS))
            with modes[call % len(modes)]():
                lost = interrupted(partial(compiled.function, *others), at)
            if lost:
                return f"replay, call {call}: Ctrl-C at point {at} was lost"
        this = _PlannedCall(call, sizes, passings, keepings, results, modes[call % len(modes)])
        wrong = _called(program, this, eager, compiled, aside=patience.chance(_ASIDE))
        if wrong:
            return f"replay, call {call}: {wrong}"
        what = _between(choices, patience, eager, compiled, forgotten=0 if patient else _FORGOTTEN)
        for place, (wanted, found) in enumerate(zip(eager.values(), compiled.values(), strict=True)):
            if not same_values(wanted, found):
                return f"replay, call {call}{what}: kept result {place} is not what it is in eager mode"
    return ""


def _called(program: Case, call: _PlannedCall, eager: _Caller, compiled: _Caller, *, aside: bool) -> str:
    """Make one call on both sides, perhaps with another one just before it; what differs."""
    before = _CallAside(program, call, eager, compiled) if aside else None
    seen = [eager.call(program, call), compiled.call(program, call, before)]
    wrong = visible_difference(*seen, kept_as=eager.by_dynamo)
    if wrong or not all(map(same_values, *((*one.outputs, *one.inputs) for one in seen))):
        return wrong or "other values than eager mode"
    return "" if before is None or before.is_right() else "the call before it on another stream has other values"


@dataclass(frozen=True)
class _Passing:
    """How the caller passes one argument.

    Attributes:
        how: "new" is a tensor in new memory, "stays" the one of the last call, "moves" another part of the memory that the
            caller has for this argument, "result" something kept.
        offset: the first element, for a new tensor and one that moves.
        refilled: whether the caller writes other values into what stays.
        which: the number of the kept thing, among those that fit.
    """

    how: str
    offset: int
    refilled: bool
    which: int

    @classmethod
    def drawn(cls, choices: Choices, habit: Sequence[str]) -> _Passing:
        return cls(choices.pick(habit), choices.pick(_OFFSETS), choices.chance(70), choices.number(0, 99))


@dataclass(frozen=True)
class _PlannedCall:
    """What both sides do in one call: the sizes, how each argument is passed and each result kept; kept results to pass; a mode."""

    number: int
    sizes: Mapping[str, int]
    passings: Sequence[_Passing]
    keepings: Sequence[str]
    results: Mapping[int, int]
    mode: _Mode


@dataclass
class _Caller:
    """One side: a function, what its caller has passed, by position, and what it keeps.

    Attributes:
        function: eager or compiled.
        by_dynamo, in_a_session, twins: as in `BothForms`.
        homes: memory of the caller's own.
        passed: the arguments of the last call.
        kept: of results.
        others: memory of somebody else.
    """

    function: Callable[..., Any]
    by_dynamo: bool
    in_a_session: bool
    twins: Mapping[int, int]
    homes: dict[int, torch.Tensor] = field(default_factory=dict)
    passed: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: list[torch.Tensor | torch.UntypedStorage] = field(default_factory=list)
    others: torch.Tensor = field(default_factory=lambda: torch.zeros(1, device="npu"))

    def values(self) -> list[torch.Tensor]:
        """Copies of all that is kept, and of the caller's memory, of which an argument may be a part."""
        return [host_copy(self.tensor(place)) for place in range(len(self.kept))] + [
            host_copy(home) for _, home in sorted(self.homes.items())
        ]

    def tensor(self, place: int) -> torch.Tensor:
        """A kept thing as a tensor."""
        kept = self.kept[place]
        return kept if isinstance(kept, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="npu").set_(kept)

    def call(self, program: Case, call: _PlannedCall, aside: _CallAside | None = None) -> Observation:
        """Make one call, perhaps right after another one, keep its results, and say what it looked like."""
        inputs: list[torch.Tensor] = [self.others] * len(program.inputs)
        for position, spec in enumerate(program.inputs):
            if position in call.results:
                inputs[position] = self.tensor(call.results[position])
            elif position not in self.twins:
                inputs[position] = self._argument(position, spec, call)
        for position, twin in self.twins.items():
            inputs[position] = alias_of(inputs[twin])
        with call.mode():
            if aside is not None:
                aside.begin()
            outputs = _as_tuple(self.function(*inputs))
            self.kept += [kept for kept in map(_kept, outputs, call.keepings) if kept is not None]
        seen = observe(inputs, outputs)
        self.passed = dict(enumerate(inputs))
        return seen

    def _argument(self, position: int, spec: Input, call: _PlannedCall) -> torch.Tensor:
        passing, values = call.passings[position], spec.values(call.sizes, call.number)
        last = self.passed.get(position)
        if passing.how == "stays" and last is not None and last.shape == values.shape:
            if passing.which < _SWAPPED and position not in self.twins.values() and not last.is_inference():
                (last.data,) = make_inputs([replace(spec, alias_of=None)], sizes=call.sizes, call=call.number)
                return last
            if passing.refilled:
                with _EVERY_TENSOR_MAY_BE_WRITTEN():
                    _rows(last).copy_(_rows(values, like=last))
            return last
        (plain,) = make_inputs([replace(spec, alias_of=None)], sizes=call.sizes, call=call.number)
        if spec.below is not None:
            return plain  # an index: its values have limits
        steps = zip(plain.shape, plain.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in steps) if plain.numel() else 0
        room = span + max(_OFFSETS) if passing.how == "moves" else span + passing.offset
        home = self.homes.get(position) if passing.how == "moves" else None
        if home is None or home.numel() < room:
            home = last = None
            for held in (self.homes, self.passed):  # its memory is free, and somebody else may get it
                held.pop(position, None)
            if passing.refilled:
                self.others = torch.zeros(1, device="npu")
            home = self.homes[position] = torch.zeros(room, dtype=plain.dtype, device="npu")
        tensor = home.as_strided(plain.shape, plain.stride(), passing.offset)
        _rows(tensor).copy_(_rows(plain))
        return tensor


class _CallAside:
    """A call on a side stream right before another one, for which nobody has waited; its inputs are its own."""

    def __init__(self, program: Case, call: _PlannedCall, eager: _Caller, compiled: _Caller) -> None:
        make, self._stream = (
            partial(make_inputs, program.inputs, sizes=call.sizes, call=-1 - call.number),
            torch.npu.Stream(),
        )
        given = make()
        with call.mode():
            seen = observe(given, _as_tuple(eager.function(*given)))
        self._wanted, self._function, self._inputs = (*seen.outputs, *seen.inputs), compiled.function, make()
        self._results: tuple[Any, ...] = ()
        torch.npu.synchronize()

    def begin(self) -> None:
        """Make the call. Its inputs are there."""
        with torch.npu.stream(self._stream):
            self._results = _as_tuple(self._function(*self._inputs))

    def is_right(self) -> bool:
        """Wait for the call and compare."""
        self._stream.synchronize()
        return all(map(same_values, self._wanted, map(host_copy, (*self._results, *self._inputs))))


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rows(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor, or its one row where another one like it is expanded from one row, in which nothing else may be written."""
    return tensor[:1] if _is_expanded(tensor if like is None else like) else tensor


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _kept(result: torch.Tensor, how: str) -> torch.Tensor | torch.UntypedStorage | None:
    if how == "storage":
        return result.untyped_storage()
    return {"tensor": result, "view": result[...], "data": result.data}.get(how)


def _results_to_pass(
    caller: _Caller, program: Case, sizes: Mapping[str, int], passings: Sequence[_Passing]
) -> dict[int, int]:
    """By argument, the kept result that is passed; nothing that shares memory with another argument."""
    chosen: dict[int, int] = {}
    taken = {home.untyped_storage().data_ptr() for home in (*caller.homes.values(), *caller.passed.values())}
    for position, (spec, passing) in enumerate(zip(program.inputs, passings, strict=True)):
        if passing.how != "result" or position in caller.twins or spec.below is not None:
            continue
        (wanted,) = make_inputs([spec], sizes=sizes)
        fitting = [
            place
            for place, kept in enumerate(caller.kept)
            if isinstance(kept, torch.Tensor)
            and (kept.shape, kept.stride(), kept.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            and kept.untyped_storage().data_ptr() not in taken
        ]
        if fitting:
            chosen[position] = fitting[passing.which % len(fitting)]
            taken.add(caller.tensor(chosen[position]).untyped_storage().data_ptr())
    return chosen


def _between(choices: Choices, extras: Choices, *callers: _Caller, forgotten: int) -> str:
    """What the caller does before its next call, on both sides; in words. ``forgotten`` is a chance."""
    kept = len(callers[0].kept)
    dropped = {place for place in range(kept) if choices.chance(_DROPPED)}
    written = choices.number(0, kept - 1) if kept and choices.chance(_WRITTEN) else None
    if written is not None and _is_expanded(callers[0].tensor(written)):
        written = None  # torch refuses the write
    if choices.chance(forgotten):
        npugraph_ex.invalidate()
    for caller in callers:
        if written is not None:
            with _EVERY_TENSOR_MAY_BE_WRITTEN():
                _change(caller.tensor(written))
        caller.kept = [thing for place, thing in enumerate(caller.kept) if place not in dropped]
    if extras.chance(_FREED):
        _free_one(extras, callers)
    return "" if written is None else f", after a write into kept result {written}"


def _change(tensor: torch.Tensor) -> None:
    """Write other values into it."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.add_(1)


def _free_one(choices: Choices, callers: Sequence[_Caller]) -> None:
    """Take the memory from a kept result in which no argument lies, by `storage.resize_(0)`; what lay there is kept no longer."""
    storages = [[_storage(kept) for kept in caller.kept] for caller in callers]
    places = [[storage.data_ptr() for storage in own] for own in storages]
    taken = [
        {0, *(_storage(held).data_ptr() for held in (*one.homes.values(), *one.passed.values()))} for one in callers
    ]
    fit = [
        at for at in range(len(places[0])) if all(own[at] not in held for own, held in zip(places, taken, strict=True))
    ]
    if not fit:
        return
    chosen = choices.pick(fit)
    gone = {place for own in places for place, at in enumerate(own) if at == own[chosen]}
    for caller, own in zip(callers, storages, strict=True):
        caller.kept = [thing for place, thing in enumerate(caller.kept) if place not in gone]
        own[chosen].resize_(0)


def _storage(kept: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return kept.untyped_storage() if isinstance(kept, torch.Tensor) else kept
