"""`npugraph-ex timeline SCRIPT`: a picture of what the streams of a program do, and a trace for Perfetto."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from npugraph_ex.commands import ranks
from npugraph_ex.commands.terminal import remark, show

if TYPE_CHECKING:
    from npu_emulator.clock.timeline import Timeline

_DESCRIPTION = """\
Run a script on the emulated NPU, follow its work on a modelled clock, and write two files:

  SCRIPT.timeline.html     a picture: one lane a stream, events as curves, idle time, the critical path, the speed-up
                           against one stream; needs nothing else, looks right on a desk and on a phone
  SCRIPT.trace.json        the same for https://ui.perfetto.dev

examples:
  npugraph-ex timeline script.py --steps 3
  npugraph-ex timeline --output pictures --json script.py

Times are a roofline model of one chip, not measurements: good for what overlaps and what waits.

Several ranks: torchrun starts the command for each, and its files have its number: SCRIPT.rank0.trace.json. One picture of all:
  python -m npu_emulator --devices 2 -m torch.distributed.run --nproc-per-node=2 -m npugraph_ex timeline script.py
  npu_emulator.merge_timelines(["script.rank0.trace.json", "script.rank1.trace.json"], "script.trace.json")

exit status: the script's; 130 after Ctrl-C, 143 after SIGTERM, with the picture so far
"""
RANKS = (
    "timeline follows one process, without --devices. For several ranks, let torchrun start it for each: `python -m npu_emulator "
    "--devices 2 -m torch.distributed.run --nproc-per-node=2 -m npugraph_ex timeline SCRIPT`; then merge the ranks' files with "
    "npu_emulator.merge_timelines"
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand, without what all that run a script have in common."""
    parser = commands.add_parser(
        "timeline", help="run a script on the emulated NPU and draw what its streams do", description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where to write (default: the current directory)"
    )
    parser.add_argument("--emulate", action="store_true", default=True, help="as elsewhere; a timeline always emulates")
    parser.add_argument("--devices", metavar="N", help=argparse.SUPPRESS)  # is refused, with what to do instead
    return parser


@contextmanager
def followed() -> Iterator[Timeline]:
    """Follow the block's work on the modelled clock, to its end, or to where it is interrupted; say why each graph is there."""
    import torch_npu

    import npu_emulator
    from npugraph_ex.graph.written_calls import function_at
    from npugraph_ex.report.captures import CaptureRecord, listening
    from npugraph_ex.report.graphs import graph_records

    with npu_emulator.timeline() as clock:

        def explain(capture: CaptureRecord) -> None:
            captured, compiled = npu_emulator.resources().captured[-1].id, "a saved compilation"
            for graph in graph_records(after=capture.graph - 1)[:1]:
                clock.names[captured] = ", ".join(
                    filter(None, (getattr(function_at(graph.place), "name", ""), Path(graph.place).name))
                )
                named = f" ({clock.names[captured]})" if graph.place else ""
                compiled = f"graph {capture.graph} of `explain`{named}, compiled {graph.cause}"
            clock.notes[captured] = f"{compiled}; captured because of {capture.reason}"

        with listening(explain):
            yield clock
            torch_npu.npu.synchronize()


@contextmanager
def drawn(arguments: argparse.Namespace, out: TextIO) -> Iterator[None]:
    """Follow the block's work; at its end, even after an error, write picture and trace and print what they come to.

    Args:
        arguments: the command line. The script's name is that of the files; their folder is made if it is not there.
        out: where the figures are printed.
    """
    from npu_emulator.clock.picture import picture
    from npu_emulator.clock.summary import summarise

    name, folder = ranks.own_name(Path(arguments.script).stem), arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{name}.timeline.html"
    clock = None
    try:
        with followed() as clock:
            yield
    finally:
        if clock is not None:
            page.write_text(picture(clock, title=f"{name}: modelled timeline"), encoding="utf-8")
            trace = clock.save(folder / f"{name}.trace.json")
            figures = summarise(clock)
            files = f"picture: {page}\ntrace:   {trace} (for https://ui.perfetto.dev)"
            with ranks.output(arguments, out) as shown, redirect_stdout(shown):
                if not clock.spans:
                    remark(arguments, "The script ran nothing on the device, so the picture is empty.")
                show(arguments, {"picture": page, "trace": trace, "figures": figures}, f"\n{figures}\n\n{files}")
