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
from npugraph_ex_conformance.forked import over_ranks
"""
