"""Random numbers, updates of captured tasks, formats, and the device itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from npugraph_ex_conformance.fidelity.rule import (
    ASSUMED,
    HEADER,
    RUNTIME,
    TORCH,
    TORCH_NPU,
    DeviceRule,
    captured,
    held,
    ones,
)

_GRAPHS = f"{TORCH}: CUDA graphs, by analogy"
_ND = 2
"""The number of the plain format."""
_RANDOM = f"{TORCH}: reproducibility"


def _draw(draw: Callable[[], torch.Tensor], seed: int = 3) -> list[float]:
    torch.npu.manual_seed(seed)
    return draw().flatten().tolist()


def _rand() -> torch.Tensor:
    return torch.rand(7, device="npu")


def _strides_of_columns(operator: Callable[[torch.Tensor], Any]) -> list[int]:
    """How the first result lies in memory when the argument, of 3 rows and 8 columns, is transposed."""
    return list(operator(ones(8, 3).t())[0].stride())


def _own_generator() -> bool:
    own = torch.Generator(device="npu").manual_seed(3)
    return torch.rand(7, device="npu", generator=own).tolist() == _draw(_rand)


def _range() -> bool:
    found = _draw(lambda: torch.rand(1 << 12, device="npu"))
    return 0 <= min(found) <= max(found) < 1


def _replays_draw(count: int = 2) -> list[list[float]]:
    graph, y = captured(_rand)
    torch.npu.manual_seed(3)
    found = []
    for _ in range(count):
        graph.replay()
        found.append(y.tolist())
    return found


def _eager_draws(count: int = 2) -> list[list[float]]:
    torch.npu.manual_seed(3)
    return [_rand().tolist() for _ in range(count)]


def _state_returns() -> bool:
    torch.npu.manual_seed(7)
    state = torch.npu.get_rng_state()
    first = _rand()
    torch.npu.set_rng_state(state)
    return bool(torch.equal(first, _rand()))


def _capture_leaves_the_generator() -> bool:
    torch.npu.manual_seed(5)
    expected = _rand()
    torch.npu.manual_seed(5)
    captured(_rand)
    return bool(torch.equal(_rand(), expected))


def _update(launches: int) -> Any:
    """A captured group of one kernel, updated with so many kernels; what the replay then computes."""
    x, out, stream = torch.arange(4.0, device="npu"), torch.zeros(4, device="npu"), torch.npu.Stream()
    graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        own = torch.npu.current_stream()
        event.wait(own)
        event.reset(own)
        torch.npu.graph_task_group_begin(own)
        torch.add(x, 1, out=out)
        handle = torch.npu.graph_task_group_end(own)
        result = out * 10
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, handle)
        for _ in range(launches):
            torch.add(x, 5, out=out)
        ended = held(lambda: torch.npu.graph_task_update_end(stream))
        event.record(stream)
    if launches != 1:
        return ended
    graph.replay()
    return result.tolist()


def _group_outside() -> str:
    return held(lambda: torch.npu.graph_task_group_begin(torch.npu.Stream()))


def _cast(x: torch.Tensor, number: int) -> torch.Tensor:
    """The tensor in a format, which torch_npu gives only where internal formats are allowed."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    try:
        return torch_npu.npu_format_cast(x, number)  # type: ignore[no-any-return]
    finally:
        torch.npu.config.allow_internal_format = False


def _storage(shape: tuple[int, ...], number: int) -> int:
    return int(_cast(torch.zeros(shape, dtype=torch.float16, device="npu"), number).untyped_storage().nbytes())


def _format(shape: tuple[int, ...], number: int, back: bool) -> Any:
    import torch_npu

    x = torch.arange(float(torch.Size(shape).numel()), device="npu").view(shape).half()
    y = _cast(x, number)
    return bool(torch.equal(_cast(y, _ND).cpu(), x.cpu())) if back else torch_npu.get_npu_format(y)


def rules() -> Iterator[DeviceRule]:
    """The rules."""
    yield DeviceRule("random.seed", "A seed decides the numbers.", _RANDOM, lambda: _draw(_rand) == _draw(_rand), True)
    yield DeviceRule(
        "random.other-seed", "Another seed gives others.", _RANDOM, lambda: _draw(_rand) == _draw(_rand, 4), False,
    )  # fmt: skip
    yield DeviceRule(
        "random.advances", "Each draw gives new numbers.", _RANDOM, lambda: len({tuple(row) for row in _eager_draws(3)}),
        3,
    )  # fmt: skip
    yield DeviceRule(
        "random.state", "A state that is set again gives its numbers again.", _RANDOM, _state_returns, True,
    )  # fmt: skip
    yield DeviceRule(
        "random.state-size", "The generator's state has 16 bytes: seed and offset.", f"{TORCH_NPU}: NPUGeneratorImpl.cpp",
        lambda: torch.npu.get_rng_state().numel(), 16,
    )  # fmt: skip
    yield DeviceRule(
        "random.replays", "Each replay draws new numbers.", _GRAPHS, lambda: len({tuple(row) for row in _replays_draw(3)}),
        3,
    )  # fmt: skip
    yield DeviceRule(
        "random.replays-are-seeded", "A seed decides what replays draw.", _GRAPHS,
        lambda: _replays_draw() == _replays_draw(), True,
    )  # fmt: skip
    yield DeviceRule(
        "random.replays-as-eager", "Replays draw what the same operators draw in eager mode at their place.", ASSUMED,
        lambda: _replays_draw() == _eager_draws(), True,
    )  # fmt: skip
    yield DeviceRule(
        "random.capture-draws-nothing", "A capture does not advance the generator.", _GRAPHS,
        _capture_leaves_the_generator, True,
    )  # fmt: skip
    yield DeviceRule(
        "random.own-generator", "A generator of the program's own draws as the device's with its seed.", _RANDOM,
        _own_generator,
        True,
    )  # fmt: skip
    yield DeviceRule(
        "random.range", "rand gives numbers from 0 to below 1.", f"{TORCH}: torch.rand",
        _range,
        True,
    )  # fmt: skip
    yield DeviceRule(
        "random.dropout-zero", "Dropout with probability 0 changes nothing.", f"{TORCH}: torch.nn.functional.dropout",
        lambda: torch.nn.functional.dropout(ones(), 0.0).tolist(), [1.0] * 4,
    )  # fmt: skip
    yield DeviceRule(
        "random.permutation", "randperm gives each number once.", f"{TORCH}: torch.randperm",
        lambda: sorted(torch.randperm(9, device="npu").tolist()), [*range(9)],
    )  # fmt: skip

    yield DeviceRule(
        "update.replaces", "An update gives a captured group new arguments for the replays that come.",
        f"{RUNTIME}: aclmdlRICaptureTaskUpdateBegin", lambda: _update(1), [50.0, 60.0, 70.0, 80.0],
    )  # fmt: skip
    yield DeviceRule(
        "update.too-few", "An update that launches no kernel for a group of one is an error.", ASSUMED,
        lambda: _update(0) != "done", True,
    )  # fmt: skip
    yield DeviceRule(
        "update.too-many", "An update that launches two kernels for a group of one is an error.", ASSUMED,
        lambda: _update(2) != "done", True,
    )  # fmt: skip
    yield DeviceRule(
        "update.group-outside", "A group on a stream that is not captured is an error.",
        f"{HEADER}: 107029, stream is not in capture status", _group_outside, "107029",
    )  # fmt: skip

    for shape, number, name in (((32, 32), 29, "nz"), ((17, 33), 29, "nz-padded"), ((2, 16, 16), 29, "nz-batched")):
        padded = [*shape[:-2], *(-(-size // 16) * 16 for size in shape[-2:])]
        yield DeviceRule(
            f"format.{name}-number", f"A cast of {shape} to FRACTAL_NZ gives format 29.", f"{TORCH_NPU}: npu_format_cast",
            partial(_format, shape, number, back=False), 29,
        )  # fmt: skip
        yield DeviceRule(
            f"format.{name}-storage", f"Its storage has both last sizes rounded up to 16: {padded}.", ASSUMED,
            partial(_storage, shape, number), 2 * torch.Size(padded).numel(),
        )  # fmt: skip
        yield DeviceRule(
            f"format.{name}-back", "The cast back to ND gives the values.", f"{TORCH_NPU}: npu_format_cast",
            partial(_format, shape, number, back=True), True,
        )  # fmt: skip
    yield DeviceRule(
        "layout.swiglu-quant", "npu_swiglu_quant gives rows, also of an argument in columns.",
        f"{TORCH_NPU}: op-plugin, SwigluquantKernelNpuOpApi.cpp",
        lambda: _strides_of_columns(lambda x: torch.ops.npu.npu_swiglu_quant(x, quant_mode=1)), [4, 1],
    )  # fmt: skip
    yield DeviceRule(
        "layout.rms-norm", "npu_rms_norm gives columns of columns, as its fake function says; op-plugin seems to make rows.",
        ASSUMED,
        lambda: _strides_of_columns(lambda x: torch.ops.npu.npu_rms_norm(x, ones(8))), [1, 3],
    )  # fmt: skip
    yield DeviceRule(
        "device.name", "The device has a name of Ascend.", f"{TORCH_NPU}: get_device_name",
        lambda: torch.npu.get_device_name().startswith("Ascend"), True,
    )  # fmt: skip
    yield DeviceRule(
        "device.count", "There is a device at least.", f"{RUNTIME}: aclrtGetDeviceCount",
        lambda: torch.npu.device_count() >= 1, True,
    )  # fmt: skip
    yield DeviceRule(
        "device.absent", "A device beyond the last is an error.", f"{HEADER}: 107001, invalid device id",
        lambda: held(lambda: torch.npu.set_device(99)) != "done", True,
    )  # fmt: skip
    yield DeviceRule(
        "device.memory", "The properties say the device's memory.", f"{TORCH_NPU}: get_device_properties",
        lambda: torch.npu.get_device_properties(0).total_memory >= torch.npu.mem_get_info()[0], True,
    )  # fmt: skip
