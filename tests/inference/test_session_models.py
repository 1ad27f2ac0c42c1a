"""What changes in a model between the calls of a session, and the models that a session refuses."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_helpers import NPU, random
from session_models import Model, equal, twins
from torch import nn
from torch.overrides import TorchFunctionMode

from npugraph_ex.errors import SessionError
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.inference import decode_session, session


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_weights_changed_in_place() -> None:
    """`copy_`, an optimizer's way and `load_state_dict` change the next call."""
    model, eager = twins()
    x = random(4, 8)
    call = session(model, (x,))
    for number in range(12):
        for one in (model, eager):
            one.up.weight.mul_(1.01)
            one.scale.copy_(torch.full((8,), float(number)))
            if number == 5:
                one.load_state_dict({name: value + 1 for name, value in eager.state_dict().items()})
        model.load_state_dict(eager.state_dict())
        equal(call(x), eager(x))


@pytest.mark.slow
@pytest.mark.parametrize("made_in_it", [True, False], ids=["made in it", "compiled in it later"])
def test_eval_reaches_a_part_that_alone_was_in_training_mode(made_in_it: bool) -> None:
    """`model.eval()` changes the next call even if the model itself was in that mode, and only a submodule was not."""
    model, eager = twins()
    x = random(4, 8)
    call = None if made_in_it else session(model, (x,))
    for one in (model, eager):
        one.dropped.train()
        one.act = nn.Tanh()  # a session notices it, and the next call is compiled with the dropout
    call = call or session(model, (x,))
    equal(call(x), eager(x))
    for one in (model, eager):
        one.eval()
    for _ in range(3):
        equal(call(x), eager(x))


@pytest.mark.slow
@pytest.mark.parametrize("compiling", [False, True], ids=["alone", "while another thread compiles"])
def test_replaced_state_is_noticed(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter, a buffer, a submodule, an assigned state: the next call has them, without `refresh`."""
    model, eager = twins()
    x = random(4, 8)
    call = session(model, (x,))

    def parameter(one: Model, value: torch.Tensor) -> None:
        one.up.weight = nn.Parameter(value)

    def buffer(one: Model, value: torch.Tensor) -> None:
        one.scale = value[0]

    def module(one: Model, value: torch.Tensor) -> None:
        one.act = nn.Tanh()

    def assigned(one: Model, value: torch.Tensor) -> None:
        one.load_state_dict({name: value.clone() + 1 for name, value in eager.state_dict().items()}, assign=True)

    def training(one: Model, value: torch.Tensor) -> None:
        one.train()

    for change in (parameter, buffer, module, assigned, training):
        equal(call(x), eager(x))
        value = random(16, 8)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "_is_compiling_flag", compiling)  # which all threads of a process see
            change(model, value.clone()), change(eager, value.clone())
        eager.load_state_dict(model.state_dict())
        for _ in range(3):
            equal(call(x), eager(x))


@pytest.mark.slow
def test_what_needs_refresh() -> None:
    """New memory, plain attributes, a submodule's mode and hooks: nothing before `refresh`, everything after; debug names it."""
    changes: dict[str, Callable[[Model], object]] = {
        r": up\.weight\.": lambda one: setattr(one.up.weight, "data", torch.full((16, 8), 0.5, device=NPU)),
        r": up\.weight\b": lambda one: torch.utils.swap_tensors(one.up.weight, nn.Parameter(random(16, 8) * 0 + 0.5)),
        r": dropped\.training\b": lambda one: one.dropped.train(),
        r"\bact\._forward_hooks\b": lambda one: one.act.register_forward_hook(lambda *given: given[2] + 1),
    }
    for name, change in changes.items():
        model, eager = twins()
        call = session(model, (random(4, 8),))
        x = random(4, 8)
        equal(call(x), eager(x))
        change(model)
        for _ in range(20):  # memory that was freed would be taken
            random(16, 8)
        equal(call(x), eager(x))
        change(eager)
        call.debug = True
        with pytest.raises(SessionError, match=rf"{name}.*refresh"):
            call(x)
        call.refresh()
        for _ in range(3):
            equal(call(x), eager(x))
        call.debug = False
        equal(call(x), eager(x))


class OfAllModels:
    """What a module holds for all models."""

    def __init__(self) -> None:
        self.called, self.tracing, self.held = 0, False, [2]


STATE, CALLED, TRACING = OfAllModels(), False, False


def change_globals(kind: str) -> None:
    """Set an attribute of one, or one itself, if ``kind`` says so."""
    global CALLED  # noqa: PLW0603 - what is tested
    if kind == "changes a global":
        STATE.called += 1
    if kind == "sets a global":
        CALLED = True


class Stateful(nn.Module):
    """What a session must refuse: each kind of change that is none of a tensor's content."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.seen = kind, 0, []
        self.register_buffer("last", torch.zeros(4))
        self.limits = torch.ones(4)  # no buffer: it stays on the CPU

    def forward(self, x: torch.Tensor) -> Any:
        """Do what ``kind`` says."""
        if self.kind == "assigns a buffer":
            self.last = x * 2
        if self.kind == "counts" or (self.kind == "counts large ones" and x.shape[0] > 4):
            self.count += 1
        change_globals(self.kind)
        if self.kind == "appends":
            self.seen.append(x + 1)
        if self.kind == "reads the CPU":
            return x + self.limits.to(x.device)
        if self.kind == "prints":
            print("called")
        if self.kind == "branches" and x.sum() > 0:
            return x + 1
        if self.kind == "nonzero":
            return x.nonzero()
        if self.kind == "view of an argument":
            return x[1:]
        if self.kind == "only the host":
            return 3
        return x * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("assigns a buffer", r"changes a buffer of Stateful, .*self\.total\.add_"),
        ("counts", r"changes Stateful\.count,"),
        ("changes a global", r"changes the global variable STATE\.called of the module [\w.]*test_session_models,"),
        ("sets a global", r"changes the global variable CALLED of the module [\w.]*test_session_models,"),
        ("appends", r"changes Stateful\.seen,"),
        ("reads the CPU", r"graph:\n  Stateful\.limits: a tensor on device 'cpu' .*; move it to the NPU"),
        ("prints", r"(?s)print.*test_session_models\.py"),
        ("branches", r"(?s)[Dd]ata-dependent.*test_session_models\.py"),
        ("nonzero", r"test_session_models\.py"),
        ("view of an argument", "view"),
        ("only the host", "nothing"),
    ],
)
def test_refused(kind: str, reason: str) -> None:
    """With the reason, and the place where torch knows it; the model is as it was."""
    model = Stateful(kind).to(NPU)
    with pytest.raises(SessionError, match=reason) as refused:
        session(model, (random(4),))
    assert not re.search(r"functools|L\[|arg\d_|decode_session|require_capture", str(refused.value))
    assert (model.count, model.seen, STATE.called, CALLED) == (0, [], 0, False)
    equal(model.last, torch.zeros(4, device=NPU))


@dataclass
class Named:
    """A result with a name."""

    value: torch.Tensor


def test_a_dataclass_is_refused() -> None:
    """Torch's pytree does not take it apart; the message says what to do."""
    with pytest.raises(SessionError, match="a result is a Named; return its fields"):
        session(lambda x: Named(x * 2), (random(4),))


def test_what_has_its_old_value_again_is_no_change() -> None:
    """A global, an attribute of an object, an object that is put back: the values of eager mode, and nothing is left."""

    def restoring(x: torch.Tensor) -> torch.Tensor:
        global TRACING  # noqa: PLW0603 - what is tested
        held, STATE.held = STATE.held, []
        TRACING = STATE.tracing = True
        y = x * 3 if TRACING and STATE.tracing and not STATE.held else x
        TRACING = STATE.tracing = False
        STATE.held = held
        return y * STATE.held[0]

    call, held = session(restoring, (random(4),)), STATE.held
    for _ in range(3):
        x = random(4)
        equal(call(x), restoring(x))
    assert (STATE.tracing, TRACING, STATE.held is held) == (False, False, True)
    STATE.tracing = True  # then the first call changes it
    with pytest.raises(SessionError, match=r"changes the global variable STATE\.tracing"):
        session(restoring, (random(4),))
    STATE.tracing = False


class Doubled(TorchFunctionMode):
    """Doubles what `torch.add` gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        del types
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.add else result


def test_a_mode_that_the_function_enters_and_leaves() -> None:
    """As models of transformers do for their masks (4.57). One that is left on the stack is a change."""

    def within(x: torch.Tensor) -> torch.Tensor:
        with Doubled():
            y = torch.add(x, 1)
        return torch.add(y, x)

    call = session(within, (random(4),))
    for _ in range(3):
        x = random(4)
        equal(call(x), torch.add(torch.add(x, 1) * 2, x))
    mode = Doubled()
    with Doubled():
        equal(session(within, (x,))(x), within(x))

    def left(x: torch.Tensor) -> torch.Tensor:
        mode.__enter__()
        return torch.add(x, 1)

    with pytest.raises(SessionError):
        session(left, (x,))


@pytest.mark.slow
def test_a_later_form_that_changes_an_attribute_goes_through_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Each such call changes it, and a warning says why; `warm_up` refuses the form and changes nothing."""
    model = Stateful("counts large ones").to(NPU)
    call = session(model, (random(4),))
    with pytest.raises(SessionError, match=r"changes Stateful\.count,"):
        call.warm_up([8], lambda size: (random(size),))
    assert model.count == 0
    for size in (4, 6, 6, 4, 6):
        x = random(size)
        equal(call(x), x * 2)
    assert model.count == 3
    assert "changes Stateful.count, which a replay would not do" in caplog.text


@pytest.mark.slow
def test_a_decoder_of_transformers() -> None:
    """Its forward sets a global of `transformers` and resets it; each step writes a static cache."""
    from npugraph_ex_conformance.models.architectures import make

    (model, inputs), (twin, _) = (make("Llama, decode step", torch.float32, NPU) for _ in range(2))
    for one in (model, twin):
        one.prepare()
    step = session(model, inputs)
    for number in range(3):
        given = [value + number for value in inputs]
        torch.testing.assert_close(step(*given), twin(*given))
    torch.testing.assert_close(model.written(), twin.written())


@pytest.mark.slow
def test_a_session_that_dies_while_another_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks on registrations go with it, and Dynamo guards on all that it met: a model that makes modules meets them."""

    def registering(x: torch.Tensor) -> torch.Tensor:
        part = nn.Module()
        part.register_buffer("twice", x * 2)
        return part.twice + 1

    def collected(**given: Any) -> Any:
        gc.collect()
        return get_npu_backend(**given)

    gc.disable()
    try:
        dead = session(lambda x: x * 2, (random(4),))
        dead.itself = dead  # type: ignore[attr-defined]
        del dead
        monkeypatch.setattr(decode_session, "get_npu_backend", collected)
        call = session(registering, (random(4),))
    finally:
        gc.enable()
    x = random(4)
    equal(call(x), registering(x))
