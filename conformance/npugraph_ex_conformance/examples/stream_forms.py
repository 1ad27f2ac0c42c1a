"""One example about how streams are written: a form of the program, compiled, under adversarial orders, against the plain one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import npu_emulator
from npugraph_ex import get_npu_backend, last_report
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.report.passes import PassReport
from npugraph_ex_conformance.models.stream_forms import FORM_NAMES, STREAMS, plain, stream_forms

_CALLS = (3, 5, 3)
"""How many elements each call's input has."""


def form_example(seed: int) -> str:
    """What is wrong with the form that ``seed`` stands for; empty when nothing is."""
    wrong, _ = check_form(FORM_NAMES[seed % len(FORM_NAMES)], dynamic=seed % 2 == 1, schedules=("lazy", "random:1"))
    return wrong


def check_form(form: str, *, dynamic: bool, schedules: Sequence[str]) -> tuple[str, PassReport | None]:
    """Compile one form and call it under each schedule.

    Returns:
        What is wrong, empty when nothing is: another value than the plain program's, a race, another number of streams;
        and the report of the compilation.
    """
    function, options = stream_forms()[form]
    torch.compiler.reset()
    config = CompilerConfig()
    apply_flat(config, options)
    fast = torch.compile(function, backend=get_npu_backend(compiler_config=config), fullgraph=True, dynamic=dynamic)
    try:
        with npu_emulator.detect_races():  # so that the others know what the first schedule captures
            wrong = next(filter(None, (_called(fast, text) for text in schedules)), "")
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"form {form} raised {type(error).__name__}: {error}", None
    graphs = npu_emulator.resources().graphs
    streams = graphs[-1].streams if graphs else 0
    if not wrong and streams != STREAMS:
        wrong = f"captured on {streams} streams instead of {STREAMS}"
    return f"form {form}, {wrong}" if wrong else "", last_report()


def _called(fast: object, text: str) -> str:
    with npu_emulator.schedule(text), npu_emulator.detect_races() as races, torch.no_grad():
        for call, rows in enumerate(_CALLS):
            x = torch.arange(rows, dtype=torch.int32) + call
            found = [value.tolist() for value in fast(x.npu())]  # type: ignore[operator]
            meant = [value.tolist() for value in plain(x)]
            if found != meant:
                return f"call {call} under {text}: {found} instead of {meant}"
    return f"under {text}: {races[0]}" if races else ""
