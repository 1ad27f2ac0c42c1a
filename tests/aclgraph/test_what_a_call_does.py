"""A replayed call checks, copies, launches and hands out; beyond that it does nothing at all."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled, random
from torch._dynamo import graph_bytecode_inputs

import npu_emulator
import npugraph_ex
from npugraph_ex._garbage_collection import no_collection

_OURS, _DEVICE = (str(Path(package.__file__).parent) for package in (npugraph_ex, npu_emulator))
_MODULES = {
    "address_guard", "capture_set", "captured_graph", "compiled_graph", "device_copies", "inputs", "outputs",
    "result_banks", "scopes", "stable_inputs",
}  # fmt: skip
_CHECK = {"_npu_getCurrentStream", "_tensors_data_ptrs_at_indices_equal", "__exit__"}  # the last is the lock's
_WATCH = {"data_ptr", "stride", "add", "min"}  # whether the inputs that are copied come to rest
_COPY = {
    "",
    "check",
}  # whether bytes alone can be copied: format (torch names operators so), and all other facts of a tensor
_WORK = {
    "replay"
}  # which Python 3.10 and 3.12 do not report; a copy is a call through ctypes; results are handed out through an attribute, `data`


def profiled(call: Callable[[], object]) -> tuple[set[str], Counter[str]]:
    """Which modules of this library run in ``call``, and what they call that is neither theirs nor the device's."""
    modules: set[str] = set()
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, given: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        here = frame.f_code.co_filename.startswith(_OURS)
        if event == "call" and frame.f_code.co_filename.startswith(_DEVICE):
            return
        if event == "call" and here:
            modules.add(Path(frame.f_code.co_filename).stem)
        if caller is None or not caller.f_code.co_filename.startswith(_OURS):
            return
        if event == "c_call":
            called[given.__name__] += 1
        elif event == "call" and not here:
            called[getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1

    earlier = sys.getprofile()
    with no_collection():  # which would finish what an earlier test has left half done
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(earlier)
    return modules, called


def test_a_replayed_call_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No logging, no strings, no question to the device but which stream is current; each once, however many parameters."""
    # Dynamo's own table: a graph that names streams, in an earlier test, gives each thread of the process one of its own.
    monkeypatch.setattr(graph_bytecode_inputs, "index_to_external_object_weakref", {})
    for layers in (1, 12):
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)]).to(NPU)
        with torch.no_grad():
            graph, inputs = compiled(model), [random(3, 4) for _ in range(24)]
            for x in inputs[:-1]:
                graph(x)
            modules, called = profiled(partial(graph, inputs[-1]))
        assert modules <= _MODULES
        assert set(called) - _WATCH | _WORK == _CHECK | _COPY | _WORK
        called.subtract(["_npu_getCurrentStream"])  # asked twice: for the order of calls, and for the copy
        assert {count for name, count in called.items() if name not in _WATCH} == {1}
