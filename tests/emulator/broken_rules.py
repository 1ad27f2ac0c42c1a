"""Breaks rules of the emulated HCCL, and runs the test that must notice: `python tests/emulator/broken_rules.py [NAME…]`.

Each break is an entry of broken_rules.toml. A copy of the checkout gets it, builds its own runtime, and runs its test there. A rule
whose test passes all the same fails the run. The time limits of HCCL are short meanwhile, because what is broken may wait for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["HcclRule", "broken", "read"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_COPIED = ("npu_emulator", "npugraph_ex", "conformance", "tests", "pyproject.toml")
_SECONDS = "20"
_LONGEST = 600
"""Seconds. Each test takes less than a minute; one that has not ended by then has noticed the break."""


class HcclRule(NamedTuple):
    """A rule, and its break.

    Attributes:
        file: of the runtime.
        old: the text that is the rule.
        new: what breaks it.
        test: the test that notices.
    """

    file: str
    old: str
    new: str
    test: str


def read() -> Mapping[str, HcclRule]:
    """Return all rules by name."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tables = tomllib.loads((_HERE / "broken_rules.toml").read_text(encoding="utf-8"))
    return {name: HcclRule(**table) for name, table in tables.items()}


def broken(rule: HcclRule, source: str) -> str:
    """Return a file of the runtime without the rule."""
    if source.count(rule.old) != 1:
        raise ValueError(
            f"{rule.file} must hold the text of the rule once, and not {source.count(rule.old)} times: {rule.old}"
        )
    return source.replace(rule.old, rule.new)


def _is_noticed(rule: HcclRule, folder: Path) -> bool:
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    file = folder / "npu_emulator" / "runtime" / rule.file
    file.write_text(broken(rule, file.read_text(encoding="utf-8")), encoding="utf-8")
    limits = dict.fromkeys(("HCCL_EXEC_TIMEOUT", "HCCL_CONNECT_TIMEOUT"), _SECONDS)
    paths = os.pathsep.join([str(folder), str(folder / "conformance")])
    settings = {**os.environ, **limits, "PYTHONPATH": paths, "NPU_EMULATOR_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/emulator/{rule.test}"]
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(
        command, cwd=folder, env=settings, stdout=pipe, stderr=same, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:  # a wait in torch's store has its own limit, half an hour
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode not in {0, 1}:
        raise RuntimeError(f"the test did not run:\n{said}")
    return process.returncode == 1


def _main(names: Sequence[str]) -> int:
    rules = read()
    unnoticed = []
    for name in names or rules:
        with tempfile.TemporaryDirectory() as folder:
            noticed = _is_noticed(rules[name], Path(folder))
        unnoticed += [] if noticed else [name]
        print(f"{name:45} {'noticed' if noticed else 'NOT NOTICED'} by {rules[name].test}", flush=True)
    return len(unnoticed)


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
