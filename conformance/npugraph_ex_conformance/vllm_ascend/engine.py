"""One process with one engine: `python -m npu_emulator -m npugraph_ex_conformance.vllm_ascend.engine run.json`.

The file holds an `EngineRun`; the result, a `Seen`, is written to the path that it names.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import npugraph_ex_autoload
from npugraph_ex_conformance.vllm_ascend.defects import DEFECTS
from npugraph_ex_conformance.vllm_ascend.sources import digest
from npugraph_ex_conformance.vllm_ascend.stand_ins import FUSED, replace_triton_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from npu_emulator.memory.report import MemoryFault

__all__ = ["Answer", "EngineRun", "Seen", "path_of"]

BLOCK = 128
"""Tokens in a block of the cache: the size that the client's attention takes."""
PLACES = 4
"""How many requests the engine decodes at once."""
SIZES = (1, 2, PLACES)
"""The sizes of the batch for which graphs are captured."""
STORING = ("atb::_npu_reshape_and_cache", "npu::npu_kv_rmsnorm_rope_cache")
"""The operators that store keys and values: the client's attention, and its latent attention."""
_PLACE = re.compile(r"(_default)?(_[0-9]+)?$")
"""What the name of a node has after its operator's."""


@dataclass(frozen=True)
class EngineRun:
    """What to run.

    Attributes:
        model: the folder of the model.
        output: where the result goes.
        waves: lists of requests, each a prompt and how many tokens it wants; a wave starts when the one before is done.
        mode: how graphs compiled by this library are captured, vLLM's `cudagraph_mode`; None for eager.
        break_cache: store no keys and values.
        break_fused: the fused operator gives a wrong query.
        defect: one of `defects.DEFECTS` that this library once had; empty for none.
        arguments: further arguments of the engine.
    """

    model: str
    output: str
    waves: list[list[tuple[list[int], int]]]
    mode: str | None
    break_cache: bool = False
    break_fused: bool = False
    defect: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What one request got: tokens, their logprobs, and how many tokens of its prompt the cache held already."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Seen:
    """What a run showed.

    Attributes:
        answers: one a request, in order.
        replays: how many replays of captured graphs.
        graphs: how many captured graphs were replayed.
        replayed: how often each kernel ran in them.
        compiled_graphs: how many graphs went through this library's passes.
        fusions: how often each of its rules fired, by the rule and what came in.
        refused: how often a rule nearly matched and was refused where no other rule fused, by the rule and the reason.
        costs: how many kernels those fusions would save in all, by the same names.
        faults: what the checks of memory and races found.
        sources: the digest of the library's files.
    """

    answers: list[Answer]
    replays: int
    graphs: int
    replayed: dict[str, int]
    compiled_graphs: int
    fusions: dict[str, int]
    refused: dict[str, int]
    costs: dict[str, int]
    faults: list[str]
    sources: str


def _break(run: EngineRun, fused: Callable[..., Any]) -> None:
    """Put in the faults that the run asks for."""
    import npu_emulator

    if run.break_cache:
        for name in STORING:
            npu_emulator.register_kernel(name, _on_copies(_formula(name)))
    if run.break_fused:

        def wrong(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            query, *others = fused(*args, **kwargs)
            return query.roll(1, -1), *others

        npu_emulator.register_kernel(FUSED, wrong)
    if run.defect:
        DEFECTS[run.defect].put_back()


def _formula(name: str) -> Callable[..., Any]:
    record: Any = npugraph_ex_autoload.KERNELS[name]
    formula: Callable[..., Any] | None = record.formula
    assert formula is not None, f"{name} has no formula"
    return formula


def _on_copies(formula: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that writes none of its arguments."""
    from torch.utils._pytree import tree_map_only

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return formula(*args, **kwargs)

    return run


def _engine(run: EngineRun) -> Any:
    from vllm import LLM

    how: dict[str, Any] = {"enforce_eager": True}
    if run.mode is not None:
        how = {
            "compilation_config": {"cudagraph_mode": run.mode, "cudagraph_capture_sizes": list(SIZES)},
            "additional_config": {"ascend_compilation_config": {"enable_npugraph_ex": True}},
        }
    return LLM(
        model=run.model, skip_tokenizer_init=True, max_model_len=2 * BLOCK, max_num_seqs=PLACES,
        max_num_batched_tokens=BLOCK // 2, enable_chunked_prefill=True, enable_prefix_caching=True,
        block_size=BLOCK, num_gpu_blocks_override=32, gpu_memory_utilization=0.5, seed=0, disable_log_stats=True,
        **how, **run.arguments,
    )  # fmt: skip


def _answers(engine: Any, waves: list[list[tuple[list[int], int]]]) -> list[Answer]:
    from vllm import SamplingParams

    found = []
    for wave in waves:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in wave],
            [
                SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, detokenize=False, logprobs=1)
                for _, wanted in wave
            ],
            use_tqdm=False,
        )
        for output in outputs:
            made = output.outputs[0]
            tokens = list(made.token_ids)
            logprobs = [at[token].logprob for token, at in zip(tokens, made.logprobs, strict=True)]
            found.append(Answer(list(output.prompt_token_ids), tokens, logprobs, output.num_cached_tokens or 0))
    return found


def _graph_memory() -> list[range]:
    """The memory of captured graphs' pools."""
    segments = torch.npu.memory_snapshot()
    return [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]


def _is_the_clients_way(fault: MemoryFault, pools: list[range]) -> bool:
    """Whether the fault is none: two things that the client does, and may do.

    It traces its patterns on examples that hold nothing, whose values nobody uses. And it keeps weak references to what a
    graph wrote into its pool: freed memory there stays with the graph; memory that another tensor took is a fault.
    """
    from npu_emulator.memory.report import FaultKind

    if fault.kind is FaultKind.UNWRITTEN:
        return any(frame.endswith(" in get_inputs") for frame in fault.allocated)
    return fault.kind is FaultKind.FREED and any(fault.address in pool for pool in pools)


def _class(rule: str) -> str:
    """The client's class of a rule, whose name is that of a function in it."""
    return rule.partition(".get_pattern.")[0].rpartition(".")[2]


def _passes() -> dict[str, Any]:
    """How many graphs this library compiled, and what its rules did in them; nothing where the bundled backend has the name."""
    if npugraph_ex_autoload.bundled_is_chosen():
        return {"compiled_graphs": 0, "fusions": {}, "refused": {}, "costs": {}}
    from npugraph_ex.report.graphs import graph_records

    records = graph_records()
    rules = [rule for record in records for rule in record.report.rules]
    fired = Counter(
        f"{_class(rule.name)} -> {_PLACE.sub('', ' '.join(one.by))}" for rule in rules for one in rule.fusions
    )
    refused, costs = Counter[str](), Counter[str]()
    for record in records:
        replaced = {node for rule in record.report.rules for one in rule.fusions for node in one.replaced}
        for miss in record.report.near_misses():
            if miss.node in replaced:  # by another rule
                continue
            refused[f"{_class(miss.rule)}: {miss.reason}"] += 1
            costs[f"{_class(miss.rule)}: {miss.reason}"] += miss.would_save.kernels
    return {"compiled_graphs": len(records), "fusions": dict(fired), "refused": dict(refused), "costs": dict(costs)}


def run_engine(run: EngineRun) -> Seen:
    """Build an engine, let it answer, and gather what the device saw; raise if the library's files changed meanwhile."""
    import npu_emulator

    sources = digest()
    _break(run, replace_triton_kernels())
    with ExitStack() as stack:
        memory = stack.enter_context(npu_emulator.check_memory())
        races = stack.enter_context(npu_emulator.detect_races())
        engine = _engine(run)
        log = stack.enter_context(npu_emulator.kernel_log())
        answers = _answers(engine, run.waves)
        torch.npu.synchronize()
        pools = _graph_memory()
        faults = [str(fault) for fault in memory if not _is_the_clients_way(fault, pools)]
    if digest() != sources:
        raise RuntimeError("the library's files changed while the engine ran; run it again")
    in_replays = [ran for ran in log if ran.graph is not None]
    return Seen(
        answers,
        replays=len({(ran.graph, ran.replay) for ran in in_replays}),
        graphs=len({ran.graph for ran in in_replays}),
        replayed=dict(Counter(ran.name for ran in in_replays)),
        **_passes(),
        faults=[*faults, *map(str, races)],
        sources=sources,
    )


def path_of(output: Path, rank: int) -> Path:
    """Return where a rank of a run writes its result."""
    return output if rank == 0 else output.with_name(f"{output.name}.rank{rank}")


def main() -> None:
    """Run what the file describes."""
    run = EngineRun(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    seen = run_engine(run)
    rank = int(os.environ.get("RANK", "0"))
    path_of(Path(run.output), rank).write_text(json.dumps(asdict(seen)), encoding="utf-8")


if __name__ == "__main__":
    main()
