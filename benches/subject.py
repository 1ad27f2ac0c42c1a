"""Measures the backend that this process calls `npugraph_ex`, and prints JSON: `python benches/subject.py host_cost 2 8`.

Run with NPUGRAPH_EX=bundled it measures the backend that torch_npu carries. Two backends need two processes, since both
want the same name; what makes their figures comparable is the floor, which each process measures beside its own.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable

import npu_emulator

npu_emulator.activate(quiet=True)

import torch  # noqa: E402
from compiling import cold_and_warm, compile_time, pieces_time, region_time  # noqa: E402
from device_calls import by_pass, device_work, modelled  # noqa: E402
from host_calls import call_instructions, host_cost, recapture, session_call, unguarded_call  # noqa: E402
from model_calls import architecture  # noqa: E402
from real_layers import real_layer  # noqa: E402
from size_memory import size_memory  # noqa: E402

QUESTIONS: dict[str, Callable[..., dict[str, float]]] = {
    question.__name__: question
    for question in (
        host_cost,
        call_instructions,
        unguarded_call,
        session_call,
        compile_time,
        region_time,
        pieces_time,
        cold_and_warm,
        device_work,
        by_pass,
        modelled,
        recapture,
        architecture,
        real_layer,
        size_memory,
    )
}


def main() -> None:
    """Answer one question, or several joined by "+", for each of the arguments: JSON, a value or a list of several."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine count as processor time
    questions = [QUESTIONS[name] for name in sys.argv[1].split("+")]
    answers = []
    with torch.no_grad():
        for text in sys.argv[2:]:
            given = json.loads(text)
            arguments = given if isinstance(given, list) else [given]
            answers.append({key: value for question in questions for key, value in question(*arguments).items()})
            print("answered", text, file=sys.stderr, flush=True)  # so that who dies tells how far it came
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
