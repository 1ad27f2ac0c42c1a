"""`npugraph-ex timeline SCRIPT`: a picture of what the streams of a program do, and a trace for Perfetto."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_emulator.clock.timeline import Timeline

_DESCRIPTION = """\
Run a script on the emulated NPU, follow its work on a modelled clock, and write two files:

  SCRIPT.timeline.html     a picture: one lane a stream, events as curves, idle time, the critical path, the speed-up
                           against one stream; needs nothing else, looks right on a desk and on a phone
  SCRIPT.trace.json        the same for https://ui.perfetto.dev

Times are a roofline model of one chip, not measurements: good for what overlaps and what waits.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand, without what all that run a script have in common."""
    parser = commands.add_parser(
        "timeline", help="run a script on the emulated NPU and draw what its streams do", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where to write (default: the current directory)"
    )
    parser.set_defaults(emulate=True)
    return parser


@contextmanager
def followed() -> Iterator[Timeline]:
    """Follow the block's work on the modelled clock, to its end, or to where it is interrupted."""
    import torch_npu

    import npu_emulator

    with npu_emulator.timeline() as clock:
        yield clock
        torch_npu.npu.synchronize()


@contextmanager
def drawn(script: str, folder: Path) -> Iterator[None]:
    """Follow the block's work; at its end, even after an error, write picture and trace and print what they come to.

    Args:
        script: what the block runs; names the files.
        folder: where they go; made if it is not there.
    """
    from npu_emulator.clock.picture import picture
    from npu_emulator.clock.summary import summarise

    name = Path(script).stem
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
            sys.stdout.write(
                f"\n{summarise(clock)}\n\npicture: {page}\ntrace:   {trace} (for https://ui.perfetto.dev)\n"
            )
