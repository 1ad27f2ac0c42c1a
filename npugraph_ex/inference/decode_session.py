"""`DecodeSession`, which `npugraph_ex.inference.session` returns: its calls replay without Dynamo's guards and AOT's wrapper.

A call whose form is known compares the form and the modes of the thread, and replays. Any other call goes through
torch.compile, which checks everything, and is recorded.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from npugraph_ex import _torch_private
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat, given_or_default
from npugraph_ex.errors import CaptureError, SessionError, address_of
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.joined_inputs import join_again
from npugraph_ex.inference.call_forms import (
    Form,
    differences,
    differing_arguments,
    differing_sizes,
    form_of,
    is_flat,
    leaves_of,
    modes_now,
    negative_zeros,
)
from npugraph_ex.inference.recorded_call import CallNotes, Gate, NotRecordableError, Probed, RecordedCall, record
from npugraph_ex.inference.replaced_state import watch
from npugraph_ex.inference.session_errors import capture_refusal, changes, core_of, reason, unfit
from npugraph_ex.observe.logger import logger

_FORMS_KEPT = 1024
"""How many forms of calls are remembered: a program that passes a counter as an int makes a form at each call."""

_ADDRESSES_KEPT = 16
"""How many calls of one form are remembered, which differ in the addresses of arguments that the graph writes."""

_OF_A_LOOP, _OF_ALL = 2, 3
"""How many captures a form needs: one for each of two live results, as in a loop that keeps the last one; a third one copies
its results, where results of two calls are alive."""

_SHARED = "an argument lies in memory that it writes"

_COMPILATIONS = 4096
"""How often torch.compile may compile the function, for sizes and numbers that are no symbols."""


class DecodeSession:
    """A function compiled for calls whose host cost does not grow with the model. Call it like the function.

    Args:
        function: a module, a function or a method.
        config: the options.
        dynamic: as in ``torch.compile``.
        debug: let torch.compile check everything at each call.

    Attributes:
        debug: the same; may be set at any time.
    """

    def __init__(
        self, function: Callable[..., Any], *, config: CompilerConfig, dynamic: bool | None, debug: bool
    ) -> None:
        self.debug = debug
        self.__wrapped__ = function
        self._root = _module_of(function)
        self._training, self._in_the_other_mode = _modes_of(self._root)
        self._notes = CallNotes()
        self._modes = modes_now()
        self._lock = threading.RLock()
        self._known: OrderedDict[Form, list[RecordedCall]] = OrderedDict()
        self._made_for: Form = ()
        self._last: RecordedCall | None = None
        self._warned: set[str] = set()
        # A model that cannot be captured is refused ahead. A form of call that comes later and cannot be captured still runs.
        self._must_capture = config.to_options().require_capture
        strict, lenient = copy.deepcopy(config), config
        apply_flat(strict, {"require_capture": True})
        strict.to_options()  # refuses options that capture nothing
        self._strict, self._lenient = (
            torch.compile(
                _code_of_its_own(function),
                backend=partial(_compile_behind_gate, chosen, self._notes, _name(function)), dynamic=dynamic, fullgraph=True,
            )
            for chosen in (strict, lenient)
        )  # fmt: skip
        self._refused: dict[Form, None] = {}
        weak = weakref.ref(self)
        watch(self, partial(_refresh, weak), None if self._root is None else weakref.ref(self._root))

    def __reduce__(self) -> NoReturn:
        """Refuse `copy` and `pickle`: two sessions would share captures, and another process has none of them."""
        raise SessionError(
            "a session holds captures of this process: copy or pickle the model, and make a session of that"
        )

    @classmethod
    def compile(
        cls,
        function: Callable[..., Any],
        example_inputs: Sequence[Any],
        *,
        config: CompilerConfig | None,
        options: Mapping[str, object] | None,
        dynamic: bool | None,
        debug: bool,
    ) -> DecodeSession:
        """See `npugraph_ex.inference.session`."""
        if not callable(function):
            raise SessionError(f"session takes a module, a function or a method, got {function!r}")
        if _torch_private.is_compiled(function):
            raise SessionError(
                f"{_name(function)} cannot be a session: it is compiled already, with options that a session would not see; give "
                "the model before torch.compile, and the options as session(..., options={...})"
            )
        if not isinstance(example_inputs, (tuple, list)):
            raise SessionError(
                f"session takes the arguments of a call in a tuple or list, got a {type(example_inputs).__name__}; one "
                "tensor alone is (tensor,)"
            )
        chosen = copy.deepcopy(given_or_default(config, "session: config"))
        # A server's other threads work with the device while a session captures.
        first = {} if config is not None else {"capture_error_mode": "thread_local"}
        apply_flat(chosen, {**first, **(options or {})})
        made = cls(function, config=chosen, dynamic=dynamic, debug=debug)
        made._made_for = form_of(tuple(example_inputs), {})
        try:
            made._run_ahead(tuple(example_inputs), {}, _OF_A_LOOP)
        except SessionError:
            raise
        except Exception as error:
            why = unfit(function, example_inputs, {}) or reason(error, _name(function))
            raise SessionError(f"{_name(function)} cannot be a session: {why}") from error
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled. Results equal those of eager mode, and no later call changes them.

        Raises:
            SessionError: another mode than at the compilation is in force, an argument is of a type that is not taken, or the
                function fails for arguments of other kinds or dtypes, or on other devices, than those of the compilation.
        """
        modes = modes_now()
        if modes != self._modes:
            raise SessionError(
                f"this session was made for other modes of the thread: {differences(self._modes, modes)}. Call it as it was "
                "made, or make another session"
            )
        with self._lock:
            if self._root is not None and self._mode_has_changed(self._root):
                self._look_again()
            call = self._last
            # Most calls of most programs are like the last one: flat tensors, compared in C.
            if call is not None and not kwargs and not self.debug and call.has_form(args) and call.accepts(args):
                served, result = call.run(args)
                if served:
                    return result
            return self._find_and_run(args, kwargs)

    def _mode_has_changed(self, root: nn.Module) -> bool:
        """Whether `train()` or `eval()` was called. The root tells, except of parts that were not in its mode."""
        if root.training is not self._training:
            return True
        return bool(self._in_the_other_mode) and any(part.training is root.training for part in self._in_the_other_mode)

    def _find_and_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the recorded call with these arguments' form and addresses; without one, go through torch.compile."""
        form, leaves = form_of(args, kwargs), leaves_of(args, kwargs)
        if self.debug:
            self._check(form, args, kwargs)
        call = self._find(form, leaves)
        if call is not None:
            served, result = call.run(leaves)
            if served:
                return result
        try:
            return self._compiled(form, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:
            said = self._in_words(error, form, args, kwargs)
            if said is None or said is error:
                raise
            raise said from error

    def _compiled(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call through torch.compile; operator by operator if the device refuses to capture it."""
        try:
            return self._through_torch(form, args, kwargs)
        except Exception as error:
            refusal = capture_refusal(error)
            if refusal is None:
                raise
            if self._must_capture or form in self._refused:
                raise refusal from None
            return self._uncaptured(refusal, form, args, kwargs)

    def _in_words(
        self, error: Exception, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> SessionError | None:
        """Why a call failed: a refusal of the session's own, or arguments that the function or the session was not made for."""
        name, why = _name(self.__wrapped__), unfit(self.__wrapped__, args, kwargs)
        if kwargs:
            return SessionError(f"{name} fails for this call: {why}") if why else None
        inner = getattr(error, "inner_exception", error)
        wrong = differing_arguments(self._made_for, form)
        if not wrong and _torch_private.failed_on_its_inputs(error):
            wrong = differing_sizes(self._made_for, form)
        if isinstance(inner, SessionError) or not wrong:
            return inner if isinstance(inner, SessionError) else None
        return SessionError(f"{name} fails for this call: {wrong}. {why or core_of(error)}")

    def _uncaptured(self, refusal: CaptureError, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that the device cannot capture, as torch.compile serves it: operator by operator. Nothing of it has run."""
        while len(self._refused) >= _FORMS_KEPT:
            self._refused.pop(next(iter(self._refused)))
        self._refused[form] = None
        try:
            result = self._through_torch(form, args, kwargs)
        except Exception:
            del self._refused[form]  # not the capture: the call itself is wrong
            raise
        self._warn(reason(refusal, _name(self.__wrapped__)))
        return result

    def refresh(self) -> None:
        """Let torch.compile check everything once more, at the next call of each form: weights, attributes, hooks, globals.

        Call it after a change that a session does not notice by itself; docs/how-to/sessions.md lists them. What has not changed is
        not compiled or captured again, but for weights that the option `join_projections` joined: these are joined anew.
        """
        join_again()
        self._look_again()

    def _look_again(self) -> None:
        """As `refresh`, after a change that joined weights follow by themselves."""
        with self._lock:
            self._last = None
            self._known.clear()

    def warm_up(self, sizes: Iterable[Any], inputs: Callable[[Any], Sequence[Any]]) -> None:
        """Compile and capture for calls to come, so that none of them has to. What the function writes is restored.

        Args:
            sizes: anything that ``inputs`` takes. The largest comes first, where sizes can be compared: then the memory of its
                captures serves all others.
            inputs: makes the arguments of a call from one of the sizes, as a tuple or list.
        """
        if not isinstance(sizes, Iterable) or not callable(inputs):
            raise SessionError(f"warm_up takes sizes in a list, and a function of a size; got {sizes!r} and {inputs!r}")
        for size in _largest_first(sizes):
            given = inputs(size)
            if not isinstance(given, (tuple, list)):
                raise SessionError(
                    f"warm_up: inputs({size!r}) returns the arguments of a call in a tuple or list, got a {type(given).__name__}"
                )
            try:
                self._run_ahead(tuple(given), {}, _OF_ALL)
            except Exception as error:
                name, refused = _name(self.__wrapped__), capture_refusal(error) is not None
                said = None if refused else self._in_words(error, form_of(tuple(given), {}), tuple(given), {})
                if said is error or not (said or refused):
                    raise
                why = said or reason(error, name)
                raise SessionError(f"warm_up: {name} cannot run ahead for {size!r}: {why}") from error

    def _run_ahead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], runs: int) -> None:
        """Compile and capture for a call, and undo what it writes.

        It runs ``runs`` times with the earlier results alive, so that it captures what a loop needs which keeps results.
        """
        form = form_of(args, kwargs)
        with self._lock, self._restoring():
            held = [self._through_torch(form, args, kwargs) for _ in range(runs)]
            del held
            if self._find(form, leaves_of(args, kwargs)) is None:
                reasons = "; ".join(sorted(self._warned)) or _SHARED
                raise SessionError(f"{_name(self.__wrapped__)} cannot be a session: {reasons}. torch.compile serves it")

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        self._notes.restoring = True
        try:
            yield
        finally:
            self._notes.restoring = False

    def _find(self, form: Form, leaves: Sequence[Any]) -> RecordedCall | None:
        """A recorded call with this form and these addresses."""
        for call in self._known.get(form, ()):
            if call.accepts(leaves):
                self._known.move_to_end(form)
                self._last = call
                return call
        return None

    def _through_torch(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that torch.compile checks, and compiles for if need be. It is recorded."""
        notes = self._notes
        notes.outer, notes.inner = None, []
        self._training, self._in_the_other_mode = _modes_of(self._root)
        leaves = leaves_of(args, kwargs)
        compiled = self._lenient if form in self._refused and not notes.restoring else self._strict
        try:
            with _torch_private.without_side_effects(compilations=_COMPILATIONS):
                result = compiled(negative_zeros(leaves), *args, **kwargs)
            try:
                call = record(notes, leaves, result)
                call.form, call.is_flat, call.compiled = form, is_flat(form, kwargs), compiled
                self._keep(form, call, leaves)
            except NotRecordableError as why:
                if form not in self._refused:  # the refusal has been said
                    self._warn(str(why))
        finally:
            for mode in notes.fake_modes:  # which the session keeps alive
                _torch_private.forget_real_tensors(mode)
            notes.outer, notes.inner, notes.fake_modes = None, [], []
        return result

    def _keep(self, form: Form, call: RecordedCall, leaves: Sequence[Any]) -> None:
        calls = [known for known in self._known.pop(form, ()) if not known.accepts(leaves)]
        self._known[form] = [call, *calls][:_ADDRESSES_KEPT]
        while len(self._known) > _FORMS_KEPT:
            self._known.popitem(last=False)
        self._last = call

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            if not self._notes.restoring:
                logger.warning(
                    "A call of the session of %s goes through torch.compile each time, because %s\n%s",
                    _name(self.__wrapped__),
                    reason,
                    address_of("SessionError"),
                )

    def _check(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Ask torch.compile what it would run, and raise if a recorded call would run something else.

        Raises:
            SessionError: the program changed what it did not tell.
        """
        leaves = leaves_of(args, kwargs)
        known = self._find(form, leaves)
        if known is None:
            return
        notes = self._notes
        notes.probing = True
        try:
            with _torch_private.without_side_effects(compilations=_COMPILATIONS):
                known.compiled(negative_zeros(leaves), *args, **kwargs)
        except Probed:
            pass
        finally:
            notes.probing = False
        assert notes.outer is not None  # noqa: S101 - a recorded call has a gate
        gate, inputs = notes.outer
        notes.outer = None
        changes = known.changes(gate, inputs)
        if changes:
            raise SessionError(
                f"{_name(self.__wrapped__)} has changed since this session recorded such a call: {', '.join(changes)}. Call "
                "refresh() after such a change"
            )


def _compile_behind_gate(
    config: CompilerConfig, notes: CallNotes, name: str, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The session's backend: the library's own, with notes of what is called."""
    if torch.is_grad_enabled() and any(
        isinstance(given, torch.Tensor) and given.requires_grad for given in example_inputs
    ):
        raise SessionError(
            "its results would carry gradients; make the session, and call it, under torch.no_grad() or torch.inference_mode()"
        )
    gate = Gate(gm, notes, _torch_private.dynamo_input_names(gm))
    lasting = _torch_private.lasting_changes()
    gate.changes = changes(lasting, name) if lasting else ""
    if gate.changes and notes.restoring:
        raise SessionError(gate.changes)
    _torch_private.allow_side_effects()
    notes.fake_modes += _torch_private.fake_modes_of(gm)
    gate.become(get_npu_backend(compiler_config=config, on_compiled=gate.watch)(gm, example_inputs))
    return gate


def _code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function``, with code that Dynamo shares with no other session."""

    def called(negative_zeros: str, /, *args: Any, **kwargs: Any) -> Any:
        if negative_zeros == "none":  # torch.compile guards on the text, and takes -0.0 for 0.0
            return function(*args, **kwargs)
        return function(*args, **kwargs)

    return FunctionType(
        called.__code__.replace(co_name=_name(function)), called.__globals__, "called", None, called.__closure__
    )


def _module_of(function: Callable[..., Any]) -> nn.Module | None:
    owner = function.__self__ if isinstance(function, MethodType) else function
    return owner if isinstance(owner, nn.Module) else None


def _modes_of(root: nn.Module | None) -> tuple[bool, list[nn.Module]]:
    """Whether a model is in training mode, and its parts that are not in its mode."""
    if root is None:
        return False, []
    return root.training, [part for part in root.modules() if part.training is not root.training]


def _largest_first(sizes: Iterable[Any]) -> list[Any]:
    given = list(sizes)
    try:
        return sorted(given, reverse=True)
    except TypeError:  # things that have no order
        return given


def _refresh(session: weakref.ref[DecodeSession]) -> None:
    alive = session()
    if alive is not None:
        alive._look_again()  # noqa: SLF001 - a session of this module


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
