"""The speed of both backends on the installed pair of torch and torch_npu, as JSON: `python benches/pair_speed.py row.json`.

`.ci/matrix.py` runs it in the environment of each pair, for a table in docs/reference/versions.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from both import BUNDLED, OURS, ask

CALLED, ROUNDS, COMPILED, TIMES = (2, 32), 12, 8, 3
"""The layers whose calls are timed, in how many rounds; the layers that are compiled, and how often."""


def main(target: Path) -> None:
    """Ask both backends, and write the columns of the row: each time, and how many times the floor's or `aot_eager`'s it is."""
    calls = ask("host_cost", *(json.dumps([layers, 2, 2, ROUNDS]) for layers in CALLED))
    compilations = ask("compile_time", json.dumps([COMPILED, TIMES]))
    row: dict[str, str] = {}
    for place, layers in enumerate(CALLED):
        for backend in (OURS, BUNDLED):
            answer = calls[backend][place]
            of_floor = answer["steady inputs"] / answer["floor"]
            row[f"call, {layers} layers, {backend}"] = f"{answer['steady inputs']:.0f} us, {of_floor:.2f}"
    for backend in (OURS, BUNDLED):
        (times,) = compilations[backend]
        row[f"compilation, {COMPILED} layers, {backend}"] = (
            f"{times['whole']:.2f} s, {times['whole'] / times['aot_eager']:.2f}"
        )
    target.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
