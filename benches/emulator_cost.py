"""What the emulated device costs, against the bars that it promises: `python benches/emulator_cost.py`.

An eager operator pays for Python twice (torch's dispatcher into the kernel, the kernel into torch's CPU operator), for looking
at its arguments once, for its output's memory from torch_npu's allocator, and for the launch; what the CPU takes is inside it.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from measure import side_by_side

import npu_emulator

NO_BAR = math.inf
"""Of a figure that is printed to explain another."""


class Cost(NamedTuple):
    """One figure: microseconds of processor time, or how many times another one it is.

    Attributes:
        part: what costs it.
        measured: the figure.
        promised: more fails.
        aim: what it should be; none where the promise says that already.
    """

    part: str
    measured: float
    promised: float = NO_BAR
    aim: float | None = None


def best_of(function: Callable[[], object], repeats: int = 7, calls: int = 400) -> float:
    """Return microseconds of processor time per call: the best of several batches, so that a busy machine tells the same."""
    for _ in range(50):
        function()
    batches = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            function()
        batches.append((time.thread_time() - start) / calls * 1e6)
    return min(batches)


def eager() -> list[Cost]:
    """Measure eager operators, in microseconds: promised are 1.3 times the CPU's cost plus 45; the aim has 10 for 45.

    A fifth is the output's memory from torch_npu's allocator, and two fifths are two dispatches and the CPU's operator.
    """
    import torch

    torch.set_num_threads(1)
    host = torch.randn(8, 8)
    device = host.npu()
    operators: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "add": lambda x: x + x,
        "mul_": lambda x: x.mul_(1.0),
        "matmul": lambda x: x @ x,
        "softmax": lambda x: x.softmax(-1),
        "cat": lambda x: torch.cat([x, x]),
        "to(float16)": lambda x: x.to(torch.float16),
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    }
    rows = []
    for name, operator in operators.items():
        subjects = {
            where: lambda given=given, operator=operator: operator(given)
            for where, given in (("cpu", host), ("npu", device))
        }
        cpu, npu = side_by_side(subjects, rounds=10, calls=300).values()
        rows += [Cost(f"eager {name}", npu, 1.3 * cpu + 45, 1.3 * cpu + 10), Cost(f"eager {name}, on the CPU", cpu)]
    with npu_emulator.null_kernels():
        rows.append(Cost("eager add_, null kernels", best_of(lambda: device.add_(1)), 20, 5))
    return rows


def graphs() -> list[Cost]:
    """Measure capture of 10,000 tasks, and replay with null kernels beyond an empty graph's replay."""
    import torch

    def capture(tasks: int) -> tuple[torch.npu.NPUGraph, float]:
        x = torch.ones(8, device="npu")
        graph = torch.npu.NPUGraph()
        start = time.thread_time()
        with torch.npu.graph(graph):
            for _ in range(tasks):
                x.add_(1)
        return graph, (time.thread_time() - start) * 1e6

    small, _ = capture(1)
    large, capturing = capture(10_000)
    # torch_npu's Python method around its own C++ one checks and logs; what it costs has nothing to do with the device below.
    replay = torch.npu.NPUGraph.__mro__[1].replay
    with npu_emulator.null_kernels():
        one, many = best_of(lambda: replay(small), repeats=20), best_of(lambda: replay(large), calls=20)
        outer = best_of(small.replay, repeats=20)
    return [
        Cost("capture of 10,000 tasks", capturing, 2e6),
        Cost("replay of 1 task, null kernels", one, 1 + 0.05),
        Cost("replay of 1 task, null kernels, through torch_npu's Python", outer),
        Cost("replay of 10,000 tasks, null kernels", many, 1 + 0.05 * 10_000),
    ]


def checking() -> list[Cost]:
    """Measure how many times as long eager operators take under the checks of races and of memory."""
    import torch
    from decoders import stack

    torch.set_num_threads(1)
    model, inputs = stack(4)

    def step() -> None:
        model(*inputs)
        torch.npu.synchronize()

    def within(check: Callable[[], AbstractContextManager[Any]]) -> float:
        with check():
            return best_of(step, repeats=5, calls=10)

    with torch.no_grad():
        alone = best_of(step, repeats=5, calls=10)
        races, memory = within(npu_emulator.detect_races), within(npu_emulator.check_memory)
    what = "eager operators with the check of {}, times"
    return [Cost(what.format("races"), races / alone, 6, 3), Cost(what.format("memory"), memory / alone, 9, 3)]


def decoding() -> list[Cost]:
    """Measure a decode step of Qwen3-0.6B at its real size, in bfloat16: how many times the CPU's own it takes."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    config = transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    steps: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        for device in ("cpu", "npu"):
            with torch.device("meta"):
                model = transformers.Qwen3ForCausalLM(config)
            model = model.eval().to(torch.bfloat16).to_empty(device=device)
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(0.01)
            cache = transformers.StaticCache(config=config, max_cache_len=64)
            given = {
                "input_ids": torch.ones(1, 1, dtype=torch.int64),
                "position_ids": torch.zeros(1, 1, dtype=torch.int64),
            }
            given = {name: value.to(device) for name, value in given.items()}
            steps[device] = lambda model=model, given=given, cache=cache: model(  # type: ignore[misc]
                **given, past_key_values=cache, use_cache=True
            )
            steps[device]()
        cpu, npu = side_by_side(steps, rounds=3, calls=3).values()
    return [Cost("decode step of Qwen3-0.6B, times the CPU's", npu / cpu, 2, 1.3)]


def importing() -> list[Cost]:
    """Measure what starting the emulator adds to `import torch`, torch_npu's own import included.

    Most of it is torch_npu's, so that is the measure: with the garbage collector on, the sum was 1.3 to 1.6 times that, and
    is 0.9 to 1.25 times now.
    The least of several turns counts, for a busy machine adds to processor time and never takes from it.
    """
    # This process is emulated, so its children find the runtime; told not to be, they import torch and torch_npu and no more.
    # Installed packages have bytecode, so these processes may write and read it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subjects = {
        "torch": ("import torch", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        "torch_npu": ("import torch", {"NPU_EMULATOR": "0"}),
        "emulated": ("import npu_emulator; npu_emulator.activate(quiet=True)", {}),
    }
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(3):
        for name, (code, variables) in subjects.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-c", code], check=True, capture_output=True, env={**environment, **variables}
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    torch_alone, with_torch_npu, emulated = (1e6 * min(times) for times in spent.values())
    beyond = 1.4 * (with_torch_npu - torch_alone)
    return [
        Cost("import torch without torch_npu", torch_alone),
        Cost("torch_npu's own import, beyond that", with_torch_npu - torch_alone),
        Cost("activate(), torch_npu included, beyond torch alone", emulated - torch_alone, beyond),
        Cost("activate(), beyond torch and torch_npu", emulated - with_torch_npu, 6e5),
    ]


def main() -> None:
    """Print each figure beside its bar; exit 1 if one is missed."""
    missed = 0
    npu_emulator.activate(quiet=True)
    for part, measured, promised, aim in [*eager(), *graphs(), *checking(), *decoding(), *importing()]:
        missed += measured > promised
        bar = "no bar" if promised == NO_BAR else f"bar {promised:12.1f}   {'MISSED' if measured > promised else 'ok'}"
        print(f"{part:76} {measured:12.1f}   {bar}" + ("" if aim is None else f"   aim {aim:.1f}"))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
