"""What lifting saves with the installed `transformers`, by model, as JSON: `python benches/release_models.py row.json`.

`.ci/matrix.py` runs it in the environment of each release, for a table in docs/reference/versions.md.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import npu_emulator

npu_emulator.activate(quiet=True)

import torch  # noqa: E402
from model_calls import work_and_errors  # noqa: E402

from npugraph_ex_conformance.models import architectures  # noqa: E402

SURE = 3.0
"""As in `test_architectures.py`."""


def cell(name: str) -> str:
    """The kernels of a call, eager and compiled, in bold where these are more, or surely farther from float64."""
    try:
        model, inputs = architectures.make(name, torch.float16, "npu")
        model.prepare()
        model(*inputs)
    except Exception as error:  # noqa: BLE001 - of the release: there is nothing to compile
        print(name, f"{type(error).__name__}: {error}", sep=": ", file=sys.stderr)
        return "does not run in eager mode"
    try:
        did = work_and_errors(name, model, inputs, "judged")
    except Exception as error:  # noqa: BLE001 - one model must not end the others
        return f"**{type(error).__name__}: {' '.join(str(error).split())[:80]}**".replace("|", "/")
    kernels = f"{did['eager kernels']:.0f} → {did['kernels']:.0f}"
    worse = did["kernels"] > did["eager kernels"] or did["log ratio"] > SURE * did["deviation"]
    return f"**{kernels}, {did['eager error']:.2g} → {did['error']:.2g}**" if worse else kernels


def main(target: Path) -> int:
    """Ask for each model.

    Returns:
        0, or 1 where a cell is bold.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    row = {}
    with torch.no_grad():
        for name in architectures.ARCHITECTURES:
            row[name] = cell(name)
            print(name, row[name], sep=": ", flush=True)
    target.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return int(any(text.startswith("**") for text in row.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
