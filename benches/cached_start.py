"""Prints the processor time of the first call of a cached method: `python benches/cached_start.py LAYERS FOLDER`."""

from __future__ import annotations

import gc
import json
import sys
import time

import npu_emulator

npu_emulator.activate(quiet=True)

import torch  # noqa: E402
from decoders import stack  # noqa: E402

from npugraph_ex.inference import cache_compile  # noqa: E402


def main() -> None:
    """Compile and save, or load, whichever it is; and run once."""
    model, inputs = stack(int(sys.argv[1]))
    model.forward = cache_compile(model.forward, cache_dir=sys.argv[2], dynamic=False)  # type: ignore[method-assign]
    # What the imports left is collected, and not looked at again: it would be paid by whichever call comes to it first.
    gc.collect()
    gc.freeze()
    with torch.no_grad():
        start = time.process_time()
        model(*inputs)
        torch.npu.synchronize()
        print(json.dumps([{"seconds": time.process_time() - start}]))


if __name__ == "__main__":
    main()
