"""`tox -e vllm`: runs the engine, prints what each run showed as it ends, and a table at the end."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import npu_emulator

npu_emulator.activate(quiet=True)  # here too: transformers looks for torch_npu

from tabulate import tabulate  # noqa: E402 - after the activation, as what follows

from npugraph_ex_conformance.vllm_ascend.models import MODELS, make  # noqa: E402
from npugraph_ex_conformance.vllm_ascend.runs import PLANS, Judged, judge, run  # noqa: E402
from npugraph_ex_conformance.vllm_ascend.start import sitecustomize  # noqa: E402, F401 - transformers imports torchvision

_DESCRIPTION = """\
Decode small models with real vLLM and vLLM-Ascend on the emulated device: eagerly, and compiled by this library and captured
(FULL_DECODE_ONLY). The requests make the batch grow and shrink, chunk a prompt, and find a prefix in the cache. Checks of memory
and races are on in every run.

what is demanded:
  eager        logprobs within 0.2 (W8A8: 0.5) of transformers in float32 on the CPU, after the same tokens; no loops
  compiled     the tokens of eager; equal logprobs, or within the judge's limit where a fusion fired; replays; fused kernels;
               under every schedule the same logprobs, to the bit
  controls     a cache that is never written, and a wrong fused kernel, are noticed

exit status: 0 all held, 1 something did not
"""
_ALWAYS = 2
"""The runs that the others are compared with: eager and compiled under `fifo`."""
_HEADERS = ("model", "run", "schedule", "from float32", "from eager", "replays", "fused kernels", "compiled", "s", "")


def main() -> int:
    """Parse the arguments, run, print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m npugraph_ex_conformance.vllm_ascend", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for models, logs and saved code")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the first two runs, and those whose name or schedule has this text"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.models) - set(MODELS))
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep or Path(temporary)
        for name in options.models or MODELS:
            folder = work / name
            folder.mkdir(parents=True)
            rows += _rows_of(name, folder, options.only)
    print("\n" + tabulate(rows, headers=_HEADERS, tablefmt="simple", disable_numparse=True))
    return int(any(row[-1] == "FAILED" for row in rows))


def _rows_of(name: str, folder: Path, only: str) -> list[tuple[str, ...]]:
    """Run one model's plans; the rows of the table."""
    reference = make(name, folder / "model")
    found: list[Judged] = []
    rows = []
    for number, plan in enumerate(PLANS):
        wanted = number < _ALWAYS or only in f"{plan.name} {plan.schedule}"
        if not wanted or (plan.break_fused and not MODELS[name].fused):
            continue
        try:
            judged = judge(plan, *run(plan, name, folder / "model", number), name, reference, found)
        except RuntimeError as error:
            print(f"{name}, {plan.name}, {plan.schedule}: {error}", flush=True)
            rows.append((name, plan.name, plan.schedule, *[""] * (len(_HEADERS) - 4), "FAILED"))
            if not found:
                break
            continue
        found.append(judged)
        rows.append(_row(name, judged))
        print(" | ".join(rows[-1]), flush=True)
        for why in judged.wrong:
            print(f"    {why}", flush=True)
    return rows


def _row(name: str, judged: Judged) -> tuple[str, ...]:
    plan, seen = judged.plan, judged.seen
    return (
        name, plan.name, plan.schedule, f"{judged.from_float32:.3f}", f"{judged.from_eager:.2g}", str(seen.replays),
        str(judged.fused), str(seen.compiled_graphs), f"{judged.seconds:.0f}",
        ("noticed" if plan.is_control else "held") if judged.held else "FAILED",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
