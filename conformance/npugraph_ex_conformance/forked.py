"""Work in forks of this process, all at once: what each returns comes back. The ranks of a program are such forks.

Only for a process whose device has not started: a fork cannot use the device of its parent.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn


def forked(*works: Callable[[], Any]) -> list[Any]:
    """What each of them returns, a JSON value; None where one fails, which prints its traceback, or is killed."""
    pipes, children = [], []
    for work in works:
        ours, theirs = os.pipe()
        children.append(os.fork())
        if children[-1] == 0:
            end_after(partial(_answer, work, theirs))
        os.close(theirs)
        pipes.append(os.fdopen(ours))
    answers = []
    for pipe in pipes:
        with pipe:
            answers.append(pipe.read())
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(answer) if answer else None for answer in answers]


def over_ranks(number: int, work: Callable[[int, int], Any], *, backend: str = "hccl") -> list[Any]:
    """What ``work(rank, number)`` returns on each rank of a new process group, as `forked` gives it.

    Each rank has its own device where there are enough.
    """
    with tempfile.TemporaryDirectory() as folder:
        return forked(*[partial(_rank, rank, number, work, backend, f"{folder}/store") for rank in range(number)])


def end_after(work: Callable[[], object]) -> NoReturn:
    """Do the work of a forked process, which must not go on as its parent."""
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever it raises
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _answer(work: Callable[[], Any], pipe: int) -> None:
    with os.fdopen(pipe, "w") as file:
        file.write(json.dumps(work()))


def _rank(rank: int, number: int, work: Callable[[int, int], Any], backend: str, store: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.npu.set_device(rank % torch.npu.device_count())  # type: ignore[attr-defined]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=number)
    return work(rank, number)
