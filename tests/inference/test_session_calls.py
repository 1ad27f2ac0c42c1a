"""A session gives what eager mode gives, whatever the form, the modes, the streams and the threads of its calls."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_helpers import NPU, Kept, agree, random
from session_models import equal, twins
from torch import nn
from torch.nn.modules import module as registration
from torch.utils._python_dispatch import TorchDispatchMode

import npu_emulator
import npugraph_ex
from npugraph_ex.errors import OptionError, SessionError
from npugraph_ex.inference import session
from npugraph_ex.report.captures import captures_so_far
from npugraph_ex.report.graphs import graphs_so_far


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.slow
def test_calls_of_many_forms_equal_eager_mode() -> None:
    """Sizes, strides, None, flags by keyword; the buffer goes on; all results stay as they were."""
    model, eager = twins()
    call = session(model.forward, (random(4, 8),), dynamic=False)
    equal(model.total, torch.zeros(8, device=NPU))  # compiling ahead left no trace
    kept: Kept = []
    for number in range(30):
        x = random(8, 3 + number % 3).t() if number % 4 == 1 else random(3 + number % 3, 8)
        x = x[:1].expand(x.size(0), 8) if number % 4 == 2 else x
        given: dict[str, Any] = {"twice": True} if number % 3 == 0 else {"other": None, "twice": False}
        arguments = (x, random(8)) if number % 2 and "other" not in given else (x,)
        kept.append((call(*arguments, **given), eager(*arguments, **given)))
        random(100)  # memory that may take what was freed by mistake
    agree(kept)
    equal(model.total, eager.total)
    before = captures_so_far()
    for _ in range(20):
        x = random(4, 8)
        equal(call(x), eager(x))
    assert captures_so_far() <= before + 2


def test_loops_keep_results() -> None:
    """The last result alive, fed back, held through a view, by its storage, and resized by the caller."""
    model, eager = twins()
    call = session(model, (random(4, 8),))
    x = y = random(4, 8)
    for _ in range(12):
        x, y = call(x), eager(y)
        equal(x, y)
    held = [(call(x)[1:, ::2], eager(x)[1:, ::2].clone()) for _ in range(5)]
    for have, want in held:
        equal(have.clone(), want.clone())
    storage, wanted = call(x).untyped_storage(), eager(x)
    call(x), eager(x)
    equal(torch.empty(0, device=NPU).set_(storage, 0, (4, 8), (8, 1)), wanted)
    call(x).resize_(100, 100).fill_(7), eager(x)
    for _ in range(3):
        equal(call(x), eager(x))
    result = call(x)
    result.add_(1), eager(x)
    equal(call(x), eager(x))


class _Counting(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("gradients", torch.enable_grad),
        ("inference mode", torch.inference_mode),
        ("autocast on the NPU", lambda: torch.autocast("npu", dtype=torch.float16)),
        ("autocast on the CPU", lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        ("the current device", lambda: torch.npu.device(1)),
        ("function modes", lambda: torch.device("npu")),
        ("dispatch modes", _Counting),
    ],
)
def test_other_modes_are_refused(what: str, mode: Callable[[], Any]) -> None:
    """Each mode that torch.compile guards on, with the name of it; a session that is made in the mode runs there, and not here."""
    torch.ones(
        1, device=f"{NPU}:1"
    )  # torch_npu ends the process in a later backward if a device was chosen and never used
    model, eager = twins()
    x = random(4, 8)
    call = session(model, (x,))
    with mode(), pytest.raises(SessionError, match=what):
        call(x)
    equal(call(x), eager(x))
    if what in {"inference mode", "autocast on the NPU"}:
        with mode():
            there = session(model, (x,))
            model.total.copy_(eager.total)
            for _ in range(3):
                equal(there(x), eager(x))
        with pytest.raises(SessionError, match=what):
            there(x)


def test_default_dtype_and_determinism_are_modes() -> None:
    """Two settings of the process."""
    call, x = session(nn.Linear(8, 8).to(NPU), (random(4, 8),)), random(4, 8)
    try:
        torch.set_default_dtype(torch.float64)
        with pytest.raises(SessionError, match="default dtype"):
            call(x)
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        torch.use_deterministic_algorithms(mode=True)
        with pytest.raises(SessionError, match="deterministic"):
            call(x)
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_gradients_are_refused() -> None:
    """A session whose results would carry gradients is refused when it is made."""
    with torch.enable_grad(), pytest.raises(SessionError, match=r"^Linear .* gradients; .*torch\.no_grad\(\)"):
        session(nn.Linear(8, 8).to(NPU), (random(4, 8),))


def test_a_compiled_model_is_refused() -> None:
    """A session compiles anew what is inside of it, and would leave the options of the first compilation out."""
    compiled = torch.compile(nn.ReLU(), backend="npugraph_ex", options={"clone_output": False})
    with pytest.raises(SessionError, match=r"cannot be a session: it is compiled already.* the options as session"):
        session(compiled, (random(4),))
    assert session(nn.ReLU(), (random(4),))(random(4)).shape == (4,)


@pytest.mark.parametrize("order", ["lazy", "random:1"])
def test_streams(order: str) -> None:
    """A call on another stream waits for the last call's, because both use the capture's buffers and memory."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp().cumsum(0) + x

    call = session(function, (random(16),), options={"clone_output": True})
    streams = [torch.npu.Stream() for _ in range(2)]
    inputs, results = [random(16) for _ in range(6)], []
    torch.npu.synchronize()
    with npu_emulator.schedule(order):
        for number, x in enumerate(inputs):
            with torch.npu.stream(streams[number % 2]):
                results.append(call(x))
        torch.npu.synchronize()
    equal(results, [function(x) for x in inputs])


def test_threads() -> None:
    """Calls of several threads run one after another; each gets its own results. A thread in another mode is refused."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(NPU)
    call = session(model, (random(4, 8),), dynamic=True)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with pytest.raises(SessionError, match="gradients enabled"):
                call(random(4, 8))
            with torch.no_grad():
                kept: Kept = []
                for number in range(15):
                    x = random(4 + (seed + number) % 3, 8)
                    kept.append((call(x), model(x)))
                agree(kept)
        except BaseException as error:  # noqa: BLE001 - it is raised below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def test_warm_up() -> None:
    """Sizes that were captured ahead are neither compiled nor captured when they come, even with results alive."""
    model, eager = twins()
    call = session(model, (random(4, 8),), dynamic=True)
    call.warm_up(range(2, 8), lambda size: (random(size, 8),))
    equal(model.total, eager.total)
    captures, graphs, kept = captures_so_far(), graphs_so_far(), []
    for number in range(2, 8):
        for _ in range(2):
            x = random(number, 8)
            kept.append((call(x), eager(x)))
    agree(kept)
    assert (captures_so_far(), graphs_so_far()) == (captures, graphs)
    with pytest.raises(SessionError, match="tuple or list"):
        call.warm_up([3], lambda size: random(size, 8))
    with pytest.raises(SessionError, match="sizes in a list"):
        call.warm_up(3, lambda size: (random(size, 8),))  # type: ignore[arg-type]


def cached_step(x: torch.Tensor, cache: torch.Tensor, row: torch.Tensor) -> dict[str, Any]:
    """Write a row of a cache in place and read all of it; nested results, one of them an argument."""
    cache.index_copy_(0, row, x * 2)
    return {"out": x @ cache.t(), "more": [cache, (x * 2, None, x.size(0), 1.5)]}


def test_caches_passed_as_arguments() -> None:
    """Written where they lie: two caches in turn, a new one, one that overlaps an argument, versions that count."""
    caches = [torch.zeros(6, 8, device=NPU) for _ in range(3)]
    copies = [cache.clone() for cache in caches]
    call = session(cached_step, (random(1, 8), caches[0], torch.tensor([1], device=NPU)))
    equal(caches[0], copies[0])
    kept = []
    for number in range(20):
        x, row = random(1, 8), torch.tensor([number % 6], device=NPU)
        which = number % 2 if number < 12 else 2
        version = caches[which]._version
        have, want = call(x, caches[which], row), cached_step(x, copies[which], row)
        assert have["more"][0] is caches[which]
        assert caches[which]._version > version
        equal(have, want)
        kept.append((have["out"], want["out"]))
    agree(kept)
    row = torch.tensor([3], device=NPU)
    for _ in range(2):  # captured for another place of the row: such a call runs as torch.compile runs it
        equal(call(caches[0][2:3], caches[0], row), cached_step(copies[0][2:3], copies[0], row))
        x = random(1, 8)
        equal(call(x, caches[0], row), cached_step(x, copies[0], row))


@pytest.mark.slow
def test_a_later_form_that_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    """It runs operator by operator, with one warning; the other forms replay. `require_capture` and `warm_up` refuse it."""

    def function(x: torch.Tensor, limits: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        x = x + limits.to(x.device)
        return x.clamp(max=limits[0].item()) if exact else x * 2

    x, limits = random(4), random(4)
    call, strict = (session(function, (x, limits), options=options) for options in ({}, {"require_capture": True}))
    for _ in range(3):
        equal(call(x, limits, exact=True), function(x, limits, exact=True))
        equal(call(x, limits.cpu()), function(x, limits.cpu()))
        before = captures_so_far()
        equal(call(x, limits), function(x, limits))
        assert captures_so_far() == before
    said = [record.getMessage() for record in caplog.records if "goes through torch.compile" in record.getMessage()]
    assert len(said) == 2
    assert "the device cannot capture its graph:\n  _local_scalar_dense: the host has to read" in said[0]
    assert "graph:\n  argument 1: a tensor on device 'cpu'" in said[1]
    with pytest.raises(npugraph_ex.errors.CaptureError, match="require_capture"):
        strict(x, limits, exact=True)
    with pytest.raises(
        SessionError, match=r"warm_up.* for 3: the device cannot capture its graph:\n  argument 1: a tensor on"
    ):
        call.warm_up([3], lambda _: (x, limits.cpu()))


@pytest.mark.slow
def test_arguments_that_are_alike_in_part() -> None:
    """One tensor twice, weights as arguments, lazily negated values, changed metadata of one object, empty sizes, numbers."""
    model = nn.Linear(8, 8).to(NPU)

    def function(x: torch.Tensor, y: Any = 1) -> Any:
        return model(x) + y, torch.copysign(x, torch.full((1,), y, device=NPU)) if isinstance(y, float) else x

    call = session(function, (random(4, 8), random(4, 8)))
    x = random(4, 8)
    spectrum = torch.fft.fft(torch.randn(4, 8)).npu()
    other: list[tuple[Any, ...]] = [
        (x, x), (x, x.clone()), (x, x), (x, model.weight[:4]), (model.weight[:4], x),
        (model.weight, model.bias), (nn.Parameter(random(8, 8)), nn.Parameter(random(8))),
        (model.weight.detach().clone(), model.bias), (x, spectrum.conj().imag), (x, spectrum.imag), (x,), (x, 1), (x, True),
        (x, 2.0), (random(0, 8), random(0, 8)), (x[::2], x[:2]), (x.half().float(), x), (nn.Parameter(x), x),
        (x.requires_grad_(), x.detach()), (x.detach(), x.detach().double()),
    ]  # fmt: skip
    for _ in range(2):
        for given in other:
            equal(call(*given), function(*given))
    z = random(4, 8)
    for change in (z.t_, z.t_, lambda: z.resize_(2, 8), lambda: z.set_(random(8, 4).t())):
        change()
        w = torch.ones(z.shape, device=NPU)
        if z.size(1) == 8:
            equal(call(z, w), function(z, w))


@pytest.mark.slow
def test_numbers_that_compare_equal() -> None:
    """1, 1.0 and True, 0.0 and -0.0: `==` holds between them, and code tells them apart."""

    def function(x: torch.Tensor, y: Any) -> torch.Tensor:
        if isinstance(y, float):
            return x.abs() / torch.full((1,), y, device=NPU)
        return x * 3 if y is True else x * y

    x = random(4)
    call = session(function, (x, 1.0))
    for _ in range(2):
        for y in (0.0, -0.0, 1.0, 1, True, 0, False):
            equal(call(x, y), function(x, y))


def test_a_program_with_native_streams_is_refused() -> None:
    """With the scope that a session takes."""

    def branches(x: torch.Tensor) -> torch.Tensor:
        side, main = torch.npu.Stream(), torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x + 1
        main.wait_stream(side)
        return y * x

    with pytest.raises(
        SessionError, match=r"cannot be a session: it uses native streams or events, .*npu_stream_switch"
    ):
        session(branches, (random(4),))


@pytest.mark.slow
def test_wrong_calls(caplog: pytest.LogCaptureFixture) -> None:
    """What is no argument of a session, and what is no call of it."""
    call = session(lambda x: x * 2, (random(4),))
    with pytest.raises(SessionError, match="slice"):
        call(slice(3))
    endless: list[Any] = [random(4)]
    endless.append(endless)
    for make in (lambda: call(endless), lambda: session(lambda x: x[0], (endless,))):
        with pytest.raises(SessionError, match="contains itself"):
            make()
    two = session(lambda x, y: x * y, (random(4), random(4)))
    for given, wrong in (
        (
            (random(4), torch.ones(4)),
            f"argument 1 is a Tensor of float32 on cpu, .* made with a Tensor of float32 on {NPU}:0",
        ),
        ((random(4), "y"), "argument 1 is a str"),
        (
            (random(4),),
            r"1 positional argument, and the session was made with 2\. It takes \(x, y\), .*missing a required argument: 'y'",
        ),
    ):
        with pytest.raises(SessionError, match=wrong):
            two(*given)
    for given, named, wrong in (
        (
            (random(4),),
            {"z": random(4)},
            "and the call has 1 positional argument and z=: missing a required argument: 'y'",
        ),
        ((random(4),) * 2, {"scal": 2.0}, "got an unexpected keyword argument 'scal'"),
        ((random(4),) * 2, {"x": random(4)}, "multiple values for argument 'x'"),
    ):
        with pytest.raises(SessionError, match=rf"<lambda> fails for this call: It takes \(x, y\), .*{wrong}"):
            two(*given, **named)
    equal(two(y=(x := random(4)), x=x), x * x)
    with pytest.raises(
        SessionError, match=r"cannot be a session: It takes \(x\), .*has 2 positional arguments: too many"
    ):
        session(lambda x: x, (random(4), random(4)))
    by_name = session(lambda named: named["x"] + named["y"], ({"x": random(4), "y": random(4)},))
    with pytest.raises(
        SessionError, match=r"argument 0 is a dict with the keys 'x', .* keys 'x', 'y'\. KeyError\('y'\)"
    ):
        by_name({"x": random(4)})
    numbers = torch.zeros(4, dtype=torch.int64, device=NPU)
    found = session(lambda x, at: x.gather(0, at), (random(4), numbers))
    wrong = rf"argument 1 is a Tensor of float32 on {NPU}:0, .* of int64 on {NPU}:0\. RuntimeError\(.*int64"
    with pytest.raises(SessionError, match=wrong):
        found(random(4), random(4))
    with pytest.raises(SessionError, match="argument 1 is an int, and the session was made with a Tensor of int64"):
        found(random(4), 3)
    with pytest.raises(SessionError, match=wrong):
        found.warm_up([4], lambda size: (random(size), random(size)))
    caplog.clear()
    product = session(torch.mm, (random(4, 4), random(4, 4)))
    for _ in range(2):
        with pytest.raises(SessionError, match=r"argument 1 is a Tensor of float16 .*same dtype"):
            product(random(4, 4), random(4, 4).half())  # torch compiles that, and it fails where it runs
    assert not caplog.records  # neither of a refused capture nor of a graph that gives up
    with pytest.raises(
        SessionError, match=r"argument 1 is a Tensor of the sizes \(5,\), .* sizes \(4,\)\. RuntimeError\("
    ):
        two(random(4), random(5))
    linear = session(torch.nn.Linear(4, 4, device=NPU, dtype=torch.float16), (random(3, 4).half(),), dynamic=True)
    with pytest.raises(
        SessionError, match=r"argument 0 is a Tensor of the sizes \(3, 5\), .* \(3, 4\)\. RuntimeError\("
    ):
        linear(random(3, 5).half())
    with pytest.raises(SessionError, match="tuple or list"):
        session(lambda x: x, random(4))  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="function"):
        session(3, (random(4),))  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        session(lambda x: x, (random(4),), options={"fores_eager": True})
    with pytest.raises(OptionError, match="force_eager"):
        session(lambda x: x, (random(4),), options={"force_eager": True})


@pytest.mark.slow
def test_captures_that_go_away() -> None:
    """`invalidate`, and a limit of captures below the number of sizes: captured again, and right."""
    model, eager = twins()
    call = session(model, (random(4, 8),), dynamic=True, options={"capture_limit": 2})
    for number in range(15):
        x = random(2 + number % 4, 8)
        equal(call(x), eager(x))
        if number % 5 == 4:
            npugraph_ex.invalidate()
            before = captures_so_far()
            equal(call(x), eager(x))
            assert captures_so_far() > before


def test_random_numbers_go_on() -> None:
    """Dropout draws anew at each call, as a captured graph does, and follows the seed."""
    model = nn.Dropout(0.5).train()
    x = torch.ones(1000, device=NPU)
    call = session(model, (x,))
    torch.npu.manual_seed(3)
    first, second = call(x), call(x)
    torch.npu.manual_seed(3)
    again = call(x)
    assert not torch.equal(first, second)
    equal(again, first)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(way: Callable[[Any], Any]) -> None:
    """Neither alone nor as a part of something: the error says what to copy instead."""
    step = session(lambda x: x + 1, (random(3),))
    with pytest.raises(SessionError, match="copy or pickle the model"):
        way(step)


@pytest.mark.slow
def test_nothing_is_left() -> None:
    """A session that is gone has no hooks, and its arguments are not held."""
    hooks = registration._global_parameter_registration_hooks
    gc.collect()
    before = len(hooks)
    call, x = session(nn.Linear(8, 8).to(NPU), (random(4, 8),)), random(4, 8)
    assert len(hooks) == before + 1
    for _ in range(3):
        call(x)
    alive = weakref.ref(x)
    del x
    assert alive() is None
    del call
    gc.collect()
    assert len(hooks) == before
