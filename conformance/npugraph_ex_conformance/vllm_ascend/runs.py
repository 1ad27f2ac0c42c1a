"""What runs, and what is demanded of it: each run is a process, judged by the eager one and by float32."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from npugraph_ex.testing.oracle.judge import Limits
from npugraph_ex_conformance.vllm_ascend.defects import DEFECTS
from npugraph_ex_conformance.vllm_ascend.engine import SIZES, Answer, EngineRun, Seen, path_of
from npugraph_ex_conformance.vllm_ascend.models import MODELS, VOCABULARY, apart, difference

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

__all__ = ["ALWAYS", "PLANS", "Judged", "Plan", "Seconds", "judge", "run"]


@dataclass(frozen=True)
class Plan:
    """One run: how it differs from the plain eager one.

    Attributes:
        name: what the table calls it.
        compiled: by this library and captured.
        schedule: of the emulated device.
        break_cache: store no keys and values.
        break_fused: the fused operator gives a wrong query.
        mode: of the captured graphs, vLLM's `cudagraph_mode`.
        environment: variables of the process.
        loads: a run before it saved the same graphs, so that none may be compiled.
        defect: one that this library had; the engine has to end with its error.
        bundled: by torch_npu's own backend, for comparison; nothing is demanded of it.
        ranks: how many processes, with a device and a part of each layer each (tensor parallelism).
    """

    name: str
    compiled: bool = False
    schedule: str = "fifo"
    break_cache: bool = False
    break_fused: bool = False
    mode: str = "FULL_DECODE_ONLY"
    environment: tuple[tuple[str, str], ...] = ()
    loads: bool = False
    defect: str = ""
    bundled: bool = False
    ranks: int = 1

    @property
    def is_control(self) -> bool:
        """Whether the run has to be found wrong."""
        return self.break_cache or self.break_fused or bool(self.defect)

    def is_of(self, model: str) -> bool:
        """Whether the run says something about a model: a control needs what it breaks, and a defect is shown on one."""
        if MODELS[model].for_fusions:
            return self.bundled or self in PLANS[:ALWAYS]
        if self.defect or self.ranks > 1:
            return model == next(iter(MODELS))
        return bool(MODELS[model].fused) or not self.break_fused

    def computes_what(self, other: Plan) -> bool:
        """Whether another plan has the same kernels: it differs by schedule, and by how the code is saved."""
        other = replace(other, name=self.name, schedule=self.schedule, environment=self.environment, loads=self.loads)
        return other == self

    def has_its_error(self, error: str) -> bool:
        """Whether an engine that ended with an error did so because of the defect."""
        return bool(self.defect) and DEFECTS[self.defect].says in error


_NAMES_AS_TEXT = (("VLLM_USE_LAYERNAME", "0"),)
"""By default the names of layers are opaque objects, and graphs with such objects are not saved."""
_OUR_PLATFORM = (
    ("VLLM_PLUGINS", "npugraph_ex,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling"),
)
"""The switch with which models in pieces are compiled by this library: its platform for the client's own."""
_BUNDLED = (("NPUGRAPH_EX", "bundled"), ("VLLM_USE_AOT_COMPILE", "0"))
"""By default vLLM compiles with Dynamo's `aot_compile`, under which the bundled backend ends with an error."""

PLANS = (
    Plan("eager"),
    Plan("compiled", compiled=True),
    Plan("compiled", compiled=True, schedule="lazy"),
    Plan("compiled, to be saved", compiled=True, schedule="random:7", environment=_NAMES_AS_TEXT),
    Plan("saved code", compiled=True, environment=_NAMES_AS_TEXT, loads=True),
    Plan("compiled", compiled=True, mode="PIECEWISE", environment=_OUR_PLATFORM),
    Plan("compiled", compiled=True, mode="FULL_AND_PIECEWISE", environment=_OUR_PLATFORM),
    Plan("eager, two ranks", ranks=2),
    Plan("compiled, two ranks", compiled=True, ranks=2),
    Plan("bundled", compiled=True, environment=_BUNDLED, bundled=True),
    Plan("control: cache never written", break_cache=True),
    Plan("control: wrong fused kernel", compiled=True, break_fused=True),
    *(Plan(f"control: {defect}", compiled=True, defect=defect) for defect in DEFECTS),
)
"""The runs of each model, in order."""
ALWAYS = 2
"""How many of them the others are compared with: eager and compiled under `fifo`."""


class Seconds(NamedTuple):
    """What a run took, by the wall clock and of the processors."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Judged:
    """A run's figures, and what was demanded and did not hold."""

    plan: Plan
    seen: Seen
    seconds: Seconds
    from_float32: float
    from_eager: float
    fused: int
    wrong: tuple[str, ...]

    @property
    def held(self) -> bool:
        """Whether the run is as it should be: a control is when it was found wrong, a defect when the engine ended."""
        return self.plan.bundled or (bool(self.wrong) == self.plan.is_control and not self.plan.defect)


def _waves() -> list[list[tuple[list[int], int]]]:
    """Six requests for four places, one prompt longer than a step takes; then one that begins as that did, and a short one."""
    long = [(37 * place + 11) % VOCABULARY for place in range(150)]
    counted = list(range(10, 50))
    first = [
        ([5, 17, 200, 31, 8], 16), ([401, 3, 99], 13), (counted, 9), (long, 5),
        ([*counted[:10], 333, *counted[11:]], 12), ([77, 8], 14),
    ]  # fmt: skip
    return [first, [([*long[:140], 9, 8, 7], 10), ([3, 5, 7, 11], 6)]]


def run(plan: Plan, name: str, model: Path, number: int) -> tuple[Seen, Seconds]:
    """Run a plan in a process of its own; return what it showed, and what it took.

    Raises:
        RuntimeError: it ended with an error; the message has its last lines.
    """
    folder = model.parent
    # What vLLM finds out about a class of models, in a process of its own, is the same for all.
    known, shared = folder / "cache" / "modelinfos", folder.parent / "modelinfos"
    shared.mkdir(exist_ok=True)
    if not known.is_symlink():
        known.parent.mkdir()
        known.symlink_to(shared)
    described, output, log = (folder / f"{number}.{end}" for end in ("json", "seen", "log"))
    this = EngineRun(
        str(model), str(output), _waves(), plan.mode if plan.compiled else None,
        break_cache=plan.break_cache, break_fused=plan.break_fused, defect=plan.defect,
        arguments=_arguments(plan, name),
    )  # fmt: skip
    described.write_text(json.dumps(asdict(this)), encoding="utf-8")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.ranks}"] if plan.ranks > 1 else []
    )
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "npu_emulator", "--schedule", plan.schedule, "--devices", str(plan.ranks), *launcher,
                "-m", "npugraph_ex_conformance.vllm_ascend.engine", str(described),
            ],
            env=_environment(folder / "cache") | dict(plan.environment), stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)  # of this process alone: others run beside it
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{plan.name} ended with status {process.returncode}; {log} ends with:\n{tail}")
    seen, *others = (_read(path_of(output, rank)) for rank in range(plan.ranks))
    for rank, other in enumerate(others, 1):
        seen.faults.extend(f"rank {rank}: {fault}" for fault in other.faults)
        if other.answers != seen.answers:
            seen.faults.append(f"rank {rank} has other tokens or logprobs than rank 0")
    return seen, Seconds(time.monotonic() - started, used.ru_utime + used.ru_stime)


def _arguments(plan: Plan, name: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"quantization": "ascend"} if MODELS[name].quantised else {}
    if plan.ranks > 1:  # one engine over the processes that torchrun starts
        arguments |= {"tensor_parallel_size": plan.ranks, "distributed_executor_backend": "external_launcher"}
    return arguments


def _read(output: Path) -> Seen:
    found = json.loads(output.read_text(encoding="utf-8"))
    found["answers"] = [Answer(**answer) for answer in found["answers"]]
    return Seen(**found)


def _environment(cache: Path) -> dict[str, str]:
    """The engine in this one process, without the network, with its cache in the work folder."""
    from npugraph_ex_conformance.vllm_ascend import start

    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*start.__path__, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONUNBUFFERED": "1",
    }


def judge(
    plan: Plan, seen: Seen, seconds: Seconds, name: str, reference: nn.Module, earlier: Sequence[Judged]
) -> Judged:
    """Compare a run with float32, with the eager run, which is the first, and with the same run under another schedule.

    Raises:
        RuntimeError: an earlier run had other files of the library. A control would seem noticed by that alone.
    """
    if any(other.seen.sources != seen.sources for other in earlier):
        raise RuntimeError(f"{plan.name} ran with other files of the library than an earlier run; run both again")
    earlier = [other for other in earlier if other.plan.ranks == plan.ranks]
    far = difference(reference, seen.answers)
    fused = sum(seen.replayed.get(kernel, 0) for kernel in MODELS[name].fused)
    wrong = list(seen.faults)
    if not far <= MODELS[name].from_float32:
        wrong.append(f"logprobs are {far:.3f} from float32, more than {MODELS[name].from_float32}")
    if not any(answer.cached for answer in seen.answers):
        wrong.append("no prefix was found in the cache")
    between = 0.0
    if not earlier:
        wrong += [
            f"a loop: {answer.tokens}" for answer in seen.answers if 2 * len(set(answer.tokens)) < len(answer.tokens)
        ]
    else:
        eager = earlier[0]
        pairs = list(zip(eager.seen.answers, seen.answers, strict=True))
        between = max(_between(one, other) for one, other in pairs)
        limit = Limits().k * eager.from_float32 if fused else 0.0
        parted = [apart(reference, one, other) for one, other in pairs if one.tokens != other.tokens]
        if parted and not (fused and max(parted) <= limit):
            wrong.append(f"other tokens than eager, {max(parted):.2g} apart in float32")
        if not between <= limit:
            wrong.append(f"logprobs are {between:.2g} from eager, more than {limit:.2g}")
    for other in earlier:
        if other.plan.computes_what(plan) and other.seen.answers != seen.answers:
            wrong.append(f"other tokens or logprobs than under {other.plan.schedule}")
    if plan.compiled:
        wanted = [*MODELS[name].fused, *(["hccl.all_reduce"] if plan.ranks > 1 else [])]
        wrong += _about_compilation(seen, wanted, loads=plan.loads or plan.bundled)
    return Judged(plan, seen, seconds, far, between, fused, tuple(wrong))


def _between(eager: Answer, answer: Answer) -> float:
    """The largest difference between the logprobs of two answers, as far as their tokens are equal."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(eager.tokens, answer.tokens, strict=True))
    pairs = zip(same, eager.logprobs, answer.logprobs, strict=False)
    return max((abs(one - other) for _, one, other in pairs), default=0.0)


def _about_compilation(seen: Seen, wanted: Sequence[str], *, loads: bool) -> list[str]:
    wrong = [f"{kernel} ran in no replay" for kernel in wanted if not seen.replayed.get(kernel)]
    if seen.graphs < len(SIZES):
        wrong.append(f"{seen.graphs} captured graphs were replayed, for {len(SIZES)} sizes of the batch")
    if bool(seen.compiled_graphs) == loads:
        wrong.append(f"{seen.compiled_graphs} graphs were compiled by this library")
    return wrong
