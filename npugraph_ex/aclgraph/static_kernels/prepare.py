"""From a graph and its sizes to installed kernels. This module alone knows all steps and their order."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from npugraph_ex._own_files import default_directory
from npugraph_ex.aclgraph import _npu_private, scopes
from npugraph_ex.aclgraph.inputs import size_key
from npugraph_ex.aclgraph.static_kernels import packages, programs
from npugraph_ex.aclgraph.static_kernels.calls import operator_calls
from npugraph_ex.aclgraph.static_kernels.describe import describe
from npugraph_ex.aclgraph.static_kernels.install import install
from npugraph_ex.aclgraph.static_kernels.lease import Lease
from npugraph_ex.config.options import Options
from npugraph_ex.errors import StaticKernelError, address_of
from npugraph_ex.observe.logger import logger

SIZES = "_vllm_aclnn_static_kernel_sym_range"
"""vLLM's option: the sizes that get static kernels. Absent or None: all sizes."""
INDEX = "_vllm_aclnn_static_kernel_sym_index"
"""vLLM's option: which of the sizes that vary decides that. Absent: the first."""

_one_at_a_time = threading.Lock()
"""CANN describes the operators of all threads of the process."""


class StaticKernels:
    """The static kernels of one compiled graph.

    Args:
        gm: the graph, after all passes.
        example_inputs: its inputs, fake or real.
        options: the validated options.
    """

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        self._gm = gm
        self._sizes = size_key(example_inputs)
        self._chosen, self._index = options.private.get(SIZES), options.private.get(INDEX, 0)
        self._keep = not options.disable_static_kernel_compile_cache
        self._limit = options.static_kernel_time_limit
        self._seen: set[tuple[Any, ...]] = set()

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Prepare kernels for inputs of these sizes. The first call for each combination compiles, and may take minutes.

        If that is impossible, one warning says why, and the graph runs with CANN's own kernels.
        """
        sizes = self._sizes(inputs)
        # An engine that captures has run the graph before. During its capture CANN cannot describe operators.
        if sizes in self._seen or torch.npu.is_current_stream_capturing():
            return
        self._seen.add(sizes)
        if not self._wanted(sizes):
            return
        try:
            with _one_at_a_time:
                self._prepare(inputs)
        except (StaticKernelError, OSError) as error:
            _warn(f"No static kernels were made, and the graph runs with CANN's own kernels: {error}")

    def _wanted(self, sizes: Sequence[Any]) -> bool:
        if not isinstance(self._chosen, Iterable) or not isinstance(self._index, int) or self._index >= len(sizes):
            return True
        return sizes[self._index] in self._chosen

    def _prepare(self, inputs: Sequence[Any]) -> None:
        compiler = programs.find_compiler()
        lease = Lease.current(default_directory() / "static_kernels")
        work = lease.work()
        try:
            described = describe(operator_calls(self._gm, inputs), work)
            chosen = work / "descriptions"
            chosen.mkdir()
            about = _about(compiler)
            new = _copy_new(described, chosen, lease.have, about)
            if not new:
                logger.debug("static kernels for all %d operators are there", len(described))
                return
            key = hashlib.sha256("".join(sorted(new)).encode()).hexdigest()

            def build() -> list[Path]:
                into = work / "built"
                into.mkdir()
                logger.info("Compiling static kernels for %d operators; this may take minutes", len(new))
                return programs.compile_descriptions(
                    compiler, chosen, into, soc=about["soc"], limit=self._limit, started=lease.note_compiler
                )

            made = packages.obtain(lease.root, key, build, limit=self._limit) if self._keep else _made_here(build())
            install(made, lease)
            lease.have |= new
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _about(compiler: Path) -> dict[str, str]:
    """What a kernel depends on besides the operator's description."""
    return {
        "soc": torch.npu.get_device_name().split()[0],
        "cann": _npu_private.cann_version(),
        "compiler": str(compiler.resolve()),
        "deterministic": str(scopes.deterministic_level()),
    }


def _copy_new(described: Sequence[Path], into: Path, have: set[str], about: dict[str, str]) -> set[str]:
    """Copy each description that has no kernel in this process yet; return the digests."""
    new: set[str] = set()
    said = json.dumps(about, sort_keys=True).encode()
    for file in described:
        digest = hashlib.sha256(said + file.read_bytes()).hexdigest()
        if digest not in have | new:
            new.add(digest)
            shutil.copy(file, into / f"{digest[:8]}_{file.name}")
    return new


def _made_here(made: list[Path]) -> list[Path]:
    for package in made:
        package.chmod(0o700)
    return made


@functools.cache
def _warn(text: str) -> None:
    """Warn once."""
    logger.warning("%s\n%s", text, address_of("StaticKernelError"))
