"""`tox -e vllm`: runs the engine, prints what each run showed as it ends, and a table at the end."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING

import npu_emulator

npu_emulator.activate(quiet=True)  # here too: transformers looks for torch_npu

from tabulate import tabulate  # noqa: E402 - after the activation, as what follows

from npugraph_ex_conformance.vllm_ascend.fusions import HEADERS, compared  # noqa: E402
from npugraph_ex_conformance.vllm_ascend.models import MODELS, make  # noqa: E402
from npugraph_ex_conformance.vllm_ascend.runs import ALWAYS, PLANS, Judged, judge, run  # noqa: E402
from npugraph_ex_conformance.vllm_ascend.start import sitecustomize  # noqa: E402, F401 - transformers imports torchvision

if TYPE_CHECKING:
    from torch import nn

_DESCRIPTION = """\
Decode small models with real vLLM and vLLM-Ascend on the emulated device: eagerly, and compiled by this library and captured
(FULL_DECODE_ONLY). The requests make the batch grow and shrink, chunk a prompt, and find a prefix in the cache. Checks of memory
and races are on in every run.

what is demanded:
  eager        logprobs within 0.2 (W8A8: 0.5) of transformers in float32 on the CPU, after the same tokens; no loops
  compiled     the tokens of eager; equal logprobs, or within the judge's limit where a fusion fired; replays; fused kernels;
               under every schedule the same logprobs, to the bit
  controls     a cache that is never written, and a wrong fused kernel, are noticed; with a defect that this library had,
               the engine ends with its error

exit status: 0 all held, 1 something did not
"""
_HEADERS = (
    "model", "run", "mode", "schedule", "from float32", "from eager", "replays", "fused kernels", "compiled", "s",
    "processor s", "",
)  # fmt: skip


def main() -> int:
    """Parse the arguments, run, print; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m npugraph_ex_conformance.vllm_ascend", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for models, logs and saved code")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the first two runs, and those whose name, schedule or mode has it"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="models at once (default: 2)")
    options = parser.parse_args()
    unknown = sorted(set(options.models) - set(MODELS))
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep or Path(temporary)
        # One after another: the seeds are of the whole process.
        references = {name: _made(name, work / name) for name in options.models or MODELS}
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {
                name: pool.submit(_judged, name, work / name, made, options.only) for name, made in references.items()
            }
        judged = {name: ended.result() for name, ended in running.items()}
        rows = [row for rows, _ in judged.values() for row in rows]
        fusions = [row for name, (_, found) in judged.items() for row in compared(name, found)]
    print("\n" + tabulate(rows, headers=_HEADERS, tablefmt="simple", disable_numparse=True))
    if fusions:
        print("\n" + tabulate(fusions, headers=HEADERS, tablefmt="simple", disable_numparse=True))
    used = sum(one.ru_utime + one.ru_stime for one in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))
    print(f"\n{time.monotonic() - started:.0f} s in all, {used:.0f} s of the processors")
    return int(any(row[-1] == "FAILED" for row in rows))


def _made(name: str, folder: Path) -> nn.Module:
    folder.mkdir(parents=True)
    return make(name, folder / "model")


def _judged(name: str, folder: Path, reference: nn.Module, only: str) -> tuple[list[tuple[str, ...]], list[Judged]]:
    """Run one model's plans; the rows of the table, and the runs that came to an end."""
    found: list[Judged] = []
    rows = []
    for number, plan in enumerate(PLANS):
        about = (name, plan.name, plan.mode if plan.compiled else "", plan.schedule)
        wanted = number < ALWAYS or only in " ".join(about)
        if not wanted or not plan.is_of(name):
            continue
        try:
            judged = judge(plan, *run(plan, name, folder / "model", number), name, reference, found)
        except RuntimeError as error:
            noticed = plan.has_its_error(str(error))
            print(f"{', '.join(about)}: {'noticed' if noticed else error}", flush=True)
            rows.append((*about, *[""] * (len(_HEADERS) - len(about) - 1), "noticed" if noticed else "FAILED"))
            if not found:
                break
            continue
        found.append(judged)
        rows.append((*about, *_figures(judged)))
        print("\n    ".join([" | ".join(rows[-1]), *judged.wrong]), flush=True)
    return rows, found


def _figures(judged: Judged) -> tuple[str, ...]:
    seen = judged.seen
    return (
        f"{judged.from_float32:.3f}", f"{judged.from_eager:.2g}", str(seen.replays), str(judged.fused),
        str(seen.compiled_graphs), f"{judged.seconds.wall:.0f}", f"{judged.seconds.processor:.0f}",
        ("noticed" if judged.plan.is_control else "held") if judged.held else "FAILED",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
