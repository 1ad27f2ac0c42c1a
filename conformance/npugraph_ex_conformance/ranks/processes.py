"""The ranks: a process that has imported everything forks one for each, which then do what they are asked, all at once.

`RankProcesses` is the caller's side. `main` is the process, started as ``python -m npu_emulator --devices N -m
npugraph_ex_conformance.ranks.processes``: it takes one order a line, a JSON list (function, arguments), and answers with one line,
the ranks' answers. A rank that fails ends after its answer, so that the others do not wait for it. The next
order goes to ranks that are forked anew.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import IO, Any, TextIO

from npugraph_ex_conformance.forked import end_after

_SHARED = (
    "torch._inductor.compile_fx", "torch._inductor.pattern_matcher", "torch._export", "npugraph_ex.frontend.entry.backend",
    "npugraph_ex.passes.pipeline", "npugraph_ex.fusion.engine", "npugraph_ex.operators", "npugraph_ex_conformance.mutants",
    "npugraph_ex_conformance.ranks.checks",
)  # fmt: skip
"""What a compilation imports: once, before the ranks are forked."""
_ENDED = "ended without an answer"


class RankProcesses:
    """The caller's side of so many ranks. After a failure the next order goes to new ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None

    def ask(self, function: str, *arguments: Any) -> list[str]:
        """What the function, ``module:name``, answers on each rank: what is wrong, or nothing."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None  # a command that is stopped ends all children
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([function, arguments]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answers: list[dict[str, Any]] = json.loads(line) if line else [{"failed": True, "said": self._output()}]
        if not line:
            self.close()
        return [answer["said"] for answer in answers]

    def close(self) -> None:
        """End the processes."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the processes
        options = ["--quiet", "--devices", str(self.ranks), "-m", __name__, str(self.ranks)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "npu_emulator", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            text=True, env={**os.environ, "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"},
        )  # fmt: skip
        return self._process

    def _output(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        return self._said.read()[-3000:]


@functools.cache
def shared_ranks(ranks: int) -> RankProcesses:
    """Ranks that stay until this process ends."""
    made = RankProcesses(ranks)
    atexit.register(made.close)
    return made


def _obey(rank: int, ranks: int, store: str, orders: TextIO, answers: TextIO) -> None:
    """Do what is asked until there is no more, or until it fails."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    npu = torch.get_device_module("npu")
    npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for line in orders:
        name, arguments = json.loads(line)
        module, _, function = name.partition(":")
        try:
            said, failed = getattr(importlib.import_module(module), function)(*arguments), False
            npu.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever a program, or a fault, raises is what was found
            traceback.print_exc()
            said, failed = f"raised {type(error).__name__}: {error}", True
        answers.write(json.dumps({"failed": failed, "said": said}) + "\n")
        answers.flush()
        if failed:
            return


def _fork(rank: int, ranks: int, store: str, earlier: list[TextIO]) -> tuple[TextIO, TextIO]:
    """Start one rank; return the pipes to it and from it. ``earlier`` are those to the ranks before."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(to_write)
        os.close(from_read)
        for pipe in earlier:
            pipe.close()  # else those ranks never see the end of their orders
        os.dup2(2, 1)  # what a program prints is no answer
        end_after(lambda: _obey(rank, ranks, store, os.fdopen(to_read), os.fdopen(from_write, "w")))
    os.close(to_read)
    os.close(from_write)
    return os.fdopen(to_write, "w"), os.fdopen(from_read)


def main() -> None:
    """Import what the ranks need, fork them, and pass orders on."""
    for module in _SHARED:
        importlib.import_module(module)

    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[tuple[TextIO, TextIO]] = []
        for number, line in enumerate(sys.stdin):
            for rank in range(len(pipes), ranks):  # none of them, or all
                pipes.append(_fork(rank, ranks, f"{folder}/{number}", [to for to, _ in pipes]))
            for to, _ in pipes:
                to.write(line)
                to.flush()
            lines = [answers.readline() for _, answers in pipes]
            found = [json.loads(line) if line else {"failed": True, "said": _ENDED} for line in lines]
            if any(answer["failed"] for answer in found):
                pipes = _end(pipes)
            print(json.dumps(found), flush=True)
        _end(pipes)


def _end(pipes: list[tuple[TextIO, TextIO]]) -> list[tuple[TextIO, TextIO]]:
    """End all ranks, and wait until they have ended. Returns the ranks that are left: none."""
    for to, _ in pipes:
        to.close()
    for _ in pipes:
        os.wait()
    return []


if __name__ == "__main__":
    main()
