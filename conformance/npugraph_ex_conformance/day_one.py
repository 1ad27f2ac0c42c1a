"""The first five minutes on an NPU: `python -m npugraph_ex_conformance.day_one --target npu`, with which `tox -e npu` begins.

Four steps, each a command that can be repeated alone: is the machine right, does the device obey the rules that the emulated one is
built on, do some random programs agree, and how fast does a small Qwen3 decode beside the modelled times. A step that fails says
what that means and what to do first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WARM_UP = 4
"""Decoded tokens before those that are timed; the first of them compile and capture."""


@dataclass(frozen=True)
class DayOneStep:
    """One command of the plan.

    Attributes:
        name: what it asks.
        command: what runs.
        seconds: after which it is ended.
        means: what a failure means, and what to do first.
        is_finding: whether exit status 1 is something to look at, and no failure.
        is_needed: whether the other steps make no sense without it.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    means: str
    is_finding: bool = False
    is_needed: bool = False


def plan(target: str, reports: Path) -> tuple[DayOneStep, ...]:
    """The steps, for a target and a folder of reports."""
    ours = (sys.executable, "-m", "npugraph_ex")
    answers = reports / "fidelity.json"
    return (
        DayOneStep(
            "environment", (*ours, "env", *(("--emulate",) if target == "emulated" else ())), 30,
            "torch, torch_npu, CANN and the driver do not fit together, or there is no device. Each line above that says so has "
            "its remedy; nothing else can work before",
            is_needed=True,
        ),
        DayOneStep(
            "fidelity", (*ours, "fidelity", "--target", target, "--output", str(answers), "--quiet"), 90,
            "the device does not obey a rule that the emulated one is built on. The rule, its source and both answers stand above. "
            f"Send {answers} to the maintainers; until then `python -m npu_emulator --as-measured {answers}` gives its errors",
            is_finding=True,
        ),
        DayOneStep(
            "conformance",
            (
                *(*ours, "conformance", "--target", target, "--jobs", "1", "--report-dir", str(reports / "conformance")),
                *("-k", "test_integers or test_memory_is_given_back"),
            ),
            120,
            "a compiled program gave other values than eager mode, or memory was not given back. Do not use the compiler here. "
            "The report has a script for each such program; options={'force_eager': True} tells passes from capture",
        ),
        DayOneStep(
            "decode", (sys.executable, "-m", "npugraph_ex_conformance.day_one", "--decode", "--target", target), 60,
            "a small Qwen3 did not compile, or its tokens differ from eager mode's. `npugraph-ex explain` shows what was captured",
        ),
    )  # fmt: skip


def follow(steps: Sequence[DayOneStep], say: Callable[[str], object], *, quiet: bool = False) -> bool:
    """Run the steps one after the other; whether none failed. If quiet, say only what is not ok, what that printed, and the end."""
    failed = []
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    for number, step in enumerate(steps, 1):
        if not quiet:
            say(f"\n[{number}/{len(steps)}] {step.name}: {' '.join(step.command)}\n")
        status: int | str
        begun, printed = time.monotonic(), ""
        try:
            done = subprocess.run(step.command, timeout=step.seconds, check=False, **pipe)
            status, printed = done.returncode, done.stdout or ""
        except subprocess.TimeoutExpired:
            status = f"still ran after {step.seconds} s"
        verdict = "ok" if status == 0 else "LOOK" if status == 1 and step.is_finding else "FAILED"
        if quiet and verdict == "ok":
            continue
        say(f"{printed}[{number}/{len(steps)}] {step.name}: {verdict}, {time.monotonic() - begun:.0f} s\n")
        if verdict != "ok":
            say(f"  {status if isinstance(status, str) else f'exit status {status}'}: {step.means}.\n")
        if verdict == "FAILED":
            failed.append(step.name)
            if step.is_needed:
                say("  the other steps are left out\n")
                break
    say(f"{'' if quiet else chr(10)}day one: {'all steps held' if not failed else 'failed: ' + ', '.join(failed)}\n")
    return not failed


def decode(*, layers: int = 2, steps: int = 32) -> dict[str, Any]:
    """Microseconds a token of a small Qwen3, eager and replayed, and whether both choose the same tokens; a target has started.

    On the emulated device the times are the modelled ones.

    Args:
        layers: of the model.
        steps: how many tokens are timed.
    """
    import torch

    import npu_emulator
    from npugraph_ex_conformance.models.decoders import Decoder, random_decoder

    decoder = Decoder(random_decoder("qwen3", layers=layers), batch=1, length=_WARM_UP + steps, quantised=False).to(
        "npu"
    )
    compiled = torch.compile(decoder, backend="npugraph_ex", fullgraph=True, dynamic=False)
    found: dict[str, Any] = {"device": torch.npu.get_device_name()}
    clock = _modelled if npu_emulator.is_active() else _measured
    chosen = []
    for name, function in (("eager", decoder), ("replayed", compiled)):
        decoder.reset()
        found[name], logits = clock(function, steps)
        chosen.append([one.argmax(-1).tolist() for one in logits])
    found["agrees"] = chosen[0] == chosen[1]
    return found


def _tokens(function: Callable[..., Any], places: range) -> Iterator[torch.Tensor]:
    """The logits after each place; a token and its place are new tensors, as a program has them."""
    import torch

    for place in places:
        with torch.no_grad():
            yield function(torch.tensor([place % 200], device="npu"), torch.tensor([place], device="npu"))[0]


def _last(logits: Iterator[torch.Tensor]) -> torch.Tensor:
    """The last ones; the others are dropped, because a replay copies what it finds in use."""
    return deque(logits, maxlen=1)[0].clone()


def _measured(function: Callable[..., Any], steps: int) -> tuple[float, list[torch.Tensor]]:
    import torch

    kept = [one.clone() for one in _tokens(function, range(_WARM_UP))]
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    kept.append(_last(_tokens(function, range(_WARM_UP, _WARM_UP + steps))))
    end.record()
    torch.npu.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / steps, kept


def _modelled(function: Callable[..., Any], steps: int) -> tuple[float, list[torch.Tensor]]:
    import npu_emulator

    with npu_emulator.timeline() as times:
        kept = [one.clone() for one in _tokens(function, range(_WARM_UP))]
        begin = times.end
        kept.append(_last(_tokens(function, range(_WARM_UP, _WARM_UP + steps))))
        return (times.end - begin) / steps, kept


def _decode_step(target: str) -> bool:
    """Decode on the target and beside it on the emulated device, print both; whether the logits agree."""
    from npugraph_ex.testing.targets import start_target

    start_target(target)
    here = decode()
    rows = [(here["device"], here)]
    if target == "npu":
        chip = str(here["device"])
        given = {**os.environ, "NPU_EMULATOR_FORCE": "1", "NPU_EMULATOR_SOC": chip}
        command = (sys.executable, "-m", __spec__.name, "--decode", "--target", "emulated", "--json")
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            rows.append((f"{chip}, modelled", json.loads(done.stdout.splitlines()[-1])))
        else:
            sys.stdout.write(f"no modelled times of {chip}: {(done.stderr.splitlines() or [''])[-1]}\n")
    for name, times in rows:
        sys.stdout.write(
            f"Qwen3, 2 layers, batch 1, {name}: {times['eager']:.1f} us a token eagerly, {times['replayed']:.1f} us replayed\n"
        )
    sys.stdout.write("its tokens are eager mode's\n" if here["agrees"] else "its tokens are NOT eager mode's\n")
    return bool(here["agrees"])


def main() -> int:
    """Parse the arguments; run the plan or, with --decode, its last step."""
    parser = argparse.ArgumentParser(prog="python -m npugraph_ex_conformance.day_one", description=__doc__)
    parser.add_argument("--target", choices=("emulated", "npu"), default="npu", help="which device (default: npu)")
    parser.add_argument("--report-dir", type=Path, default=Path("day_one"), metavar="DIR", help="where files go")
    parser.add_argument("--decode", action="store_true", help="the last step alone")
    parser.add_argument("--json", action="store_true", help="with --decode: one JSON value")
    parser.add_argument("--quiet", action="store_true", help="print only steps that are not ok, and the result")
    arguments = parser.parse_args()
    if arguments.json:
        from npugraph_ex.testing.targets import start_target

        start_target(arguments.target)
        sys.stdout.write(f"{json.dumps(decode())}\n")
        return 0
    if arguments.decode:
        return int(not _decode_step(arguments.target))
    arguments.report_dir.mkdir(parents=True, exist_ok=True)
    return int(not follow(plan(arguments.target, arguments.report_dir), _say, quiet=arguments.quiet))


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
