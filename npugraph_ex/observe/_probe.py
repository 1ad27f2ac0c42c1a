"""A program, not a module: tells as JSON what `import torch` brings in a fresh interpreter.

`environment.py` starts it by its path, because importing torch can fail, can be slow, and settles the name
`npugraph_ex` for the whole process. It must not import this library itself: what the name means is the question.
"""

import importlib
import json
import sys


def _error(error: BaseException) -> str:
    """Name an error and what caused it, innermost last, in one line."""
    parts = []
    cause: BaseException | None = error
    while cause is not None:
        parts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return " <- ".join(parts).replace("\n", " ")


def probe(*, emulate: bool) -> dict[str, object]:
    """Import what a user's program imports and look at what came."""
    found: dict[str, object] = {"error": None, "device": None, "import_name": None, "backend_string": None}
    try:
        if emulate:
            importlib.import_module("npu_emulator").activate(quiet=True)
        torch = importlib.import_module("torch")
        importlib.import_module("torch_npu")
        count = torch.npu.device_count()
        found["device"] = torch.npu.get_device_name(0) if count else None
        # As the statement does it: on Python 3.10 import_module alone leaves torch_npu's lazy module as it is.
        __import__("npugraph_ex")
        found["import_name"] = sys.modules["npugraph_ex"].__file__
        backend = importlib.import_module("torch._dynamo.backends.registry").lookup_backend("npugraph_ex")
        found["backend_string"] = f"{backend.__module__}.{backend.__qualname__}"
        hook = sys.modules.get("npugraph_ex_autoload")
        found["aside"] = hook.failures.get("part") if hook is not None else None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        found["error"] = _error(error)
    return found


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no -P
        del sys.path[0]  # this file's folder, whose modules are not to be imported by their bare names
    # Last line of stdout: torch_npu prints warnings there too.
    result = probe(emulate="--emulate" in sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(result) + "\n")
