"""The beginning of a program over several ranks, for `ask`: emulated processes that are forked before their device starts.

And the marks of tests with such programs.
"""

from __future__ import annotations

import pytest

import npu_emulator
from npugraph_ex.versions import missing_interfaces

__all__ = ["RANKS", "on_emulated_ranks", "with_all_interfaces"]

on_emulated_ranks = pytest.mark.skipif(
    not npu_emulator.is_active(), reason="emulated processes; real ones need several devices"
)
with_all_interfaces = pytest.mark.skipif(missing_interfaces.DIFFERENCE.older, reason=missing_interfaces.DIFFERENCE.what)

RANKS = """
import json, os, sys, tempfile, traceback
import npu_emulator
npu_emulator.activate(quiet=True)
import torch
import torch.distributed as dist

def over_ranks(number, work):
    # Forks before the device starts, so that each process has one of its own; returns what each rank's work returned.
    store = tempfile.mktemp()
    pipes, children = [os.pipe() for _ in range(number)], []
    for rank in range(number):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.npu.set_device(rank)
                dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=number)
                os.write(pipes[rank][1], json.dumps(work(rank, number)).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
        os.close(pipes[rank][1])
    answers = [os.fdopen(ours).read() for ours, _ in pipes]
    for child in children:
        os.waitpid(child, 0)
    return [json.loads(answer) if answer else None for answer in answers]
"""
