"""Runs the checks on every supported pair of torch and torch_npu, and writes the tables of docs/reference/versions.md.

`tox -e matrix` runs it: for each pair the emulator's tests, the unit tests, the quick profile of the conformance suite, its models,
and the speed of both backends. `--checks` and `--torch` choose some; the other cells keep what they say. `--python` runs what may
differ between releases of Python, on one pair, and `--transformers` what compiles its models. Each runs in a tox environment of its
own. The tests run in parts of a few files: `--resume` keeps the parts that passed in an earlier run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
CHECKED, TIMED, ON_PYTHON, WITH_MODELS, LIFTED = (
    f"<!-- written by `tox -e matrix`{of} -->\n"
    for of in ("", ": speed", ": Python", ": transformers", ": architectures")
)
END = "<!-- end -->\n"
SMOKE = (
    "tests/versions tests/environment/test_private_names.py "
    "tests/integrations/test_vllm_ascend_contract.py tests/integrations/test_vllm_compiler.py "
    "tests/aclgraph/test_operator_contracts.py"
)
"""The records of differences, all private names, the client's contract, compiler and operators."""
USERS = (
    "tests/inference/test_session_models.py tests/inference/test_sliding_windows.py tests/inference/test_beam_search.py "
    "tests/streams/test_auto_streams.py"
)
"""Of the unit tests, those that compile models of transformers."""
SUITE = "npugraph-ex conformance --target=emulated --report-dir={work}"
PART = 10
"""The test files of one command."""


def in_parts(files: Iterable[Path]) -> tuple[str, ...]:
    """The commands that run some test files."""
    names = sorted(str(file.relative_to(ROOT)) for file in files)
    parts = (names[begin : begin + PART] for begin in range(0, len(names), PART))
    return tuple(f"pytest -q -n {{jobs}} {' '.join(part)}" for part in parts)


EMULATOR, ALL = (set((ROOT / folder).rglob("test_*.py")) for folder in ("tests/emulator", "tests"))
CHECKS: Mapping[str, tuple[str, ...]] = {
    "smoke": (f"pytest -q -n {{jobs}} {SMOKE}", f"{SUITE}/smoke -k 'test_decodes_the_same_tokens and llama'"),
    "emulator": in_parts(EMULATOR),
    "unit": in_parts(ALL - EMULATOR),
    "suite": (f"{SUITE}/conformance --jobs={{jobs}}",),
    "models": (f"{SUITE}/models -k model",),
    "users": (f"pytest -q -n {{jobs}} {USERS}",),
}
"""The commands by the column of the table. The suite has the models among other programs; their column is for them alone.
`.ci/run` runs the smoke set, with one model, on the pair of one client."""


PYTHONS = {"3.10": "2.13.0", "3.12": "2.13.0", "3.13": "2.13.0", "3.14": "2.13.0"}
"""The releases of Python beside the one on which all pairs are checked, each with its release of torch."""
TRANSFORMERS = {"4.57.6": "2.13.0", "5.0.0": "2.13.0", "5.24.0": "2.13.0"}
"""The oldest release of transformers that the tests take, the first with another number in front, and a late one; with torch."""
PAIR_CHECKS, PYTHON_CHECKS = ("smoke", "emulator", "unit", "suite", "models"), ("smoke", "emulator", "suite")
MODEL_CHECKS = ("models", "users")


def pairs() -> dict[str, str]:
    """The release of torch_npu by that of torch; read as text, because torch is not here."""
    text = (ROOT / "npugraph_ex" / "versions" / "pairs.py").read_text(encoding="utf-8")
    return dict(re.findall(r'^    "([\d.]+)": "([\w.]+)",$', text, re.MULTILINE))


def environment_of(row: str) -> str:
    """The tox environment of a release of torch, Python or transformers."""
    of = "py" if row in PYTHONS else "transformers" if row in TRANSFORMERS else "torch"
    return f"tests-{of}{''.join(row.split('.')[:2])}"


def run(row: str, check: str, options: argparse.Namespace) -> str:
    """One cell: what the check's commands said in their last lines, and the day of the oldest."""
    name = environment_of(row)
    wrote, failed, days = "", [], []
    for number, line in enumerate(CHECKS[check]):
        command = line.format(work=options.work / name, jobs=options.jobs)
        log = options.work / f"{name}-{check}-{number}.log"
        end = f"== passed: {line}\n"
        if not (options.resume and log.exists() and log.read_text(errors="replace").endswith(end)):
            with log.open("w", encoding="utf-8") as stream:
                status = subprocess.run(
                    inside(name, shlex.split(command), options.environment),
                    cwd=ROOT,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
                stream.write(end if status == 0 else f"== status {status}: {line}\n")
        said = log.read_text(errors="replace")
        wrote += said
        days.append(dt.date.fromtimestamp(log.stat().st_mtime))  # noqa: DTZ012 - the day where it ran
        if not said.endswith(end):
            failed.append(f"{said[-8000:]}log in {log}")
    cell = f"{summary(wrote, failed=bool(failed))}, {min(days)}"
    print(*failed, f"{name}: {check}: {cell}", sep="\n", flush=True)
    return cell


def inside(name: str, command: list[str], environment: Path | None) -> list[str]:
    """The command as it runs in ``environment``, or in the one of this name that tox makes."""
    if environment is None:
        return [sys.executable, "-m", "tox", "run", "-e", name, "--", *command]
    return [str(environment / "bin" / command[0]), *command[1:]]


def summary(wrote: str, *, failed: bool) -> str:
    """What the closing lines of pytest in some logs say, added up; in bold where a check failed."""
    counts: Counter[str] = Counter()
    for line in re.findall(r"^=*(.* in [\d.]+s\b.*)$", wrote, re.MULTILINE):
        for number, word in re.findall(r"\b(\d+) (passed|failed|error|skipped)", line):
            counts[word] += int(number)
    words = ", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "no tests"
    return f"**{words}**" if failed else words


def time(torch: str, options: argparse.Namespace) -> dict[str, str]:
    """The row of speeds of a pair, by column."""
    name = environment_of(torch)
    target = options.work / f"{name}-speed.json"
    command = ["python", "benches/pair_speed.py", str(target)]
    subprocess.run(inside(name, command, options.environment), cwd=ROOT, check=True)
    row: dict[str, str] = json.loads(target.read_text(encoding="utf-8"))
    return row


def lifted(release: str, options: argparse.Namespace) -> bool:
    """Write the column of a release of transformers: what lifting saves, by model. Whether a cell is bold."""
    name = environment_of(release)
    target = options.work / f"{name}-lifted.json"
    command = ["python", "benches/release_models.py", str(target)]
    status = subprocess.run(inside(name, command, options.environment), cwd=ROOT, check=False).returncode
    page = PAGE.read_text(encoding="utf-8")
    known = cells(page, LIFTED, names=1)
    for model, cell in json.loads(target.read_text(encoding="utf-8")).items():
        known.setdefault(model, {})[release] = cell
    rows = [["model", *TRANSFORMERS], ["---"] * (1 + len(TRANSFORMERS))]
    rows += [[model, *(row.get(one, "not run") for one in TRANSFORMERS)] for model, row in known.items()]
    if not options.keep_page:
        put(page, LIFTED, rows)
    return status != 0


def cells(page: str, begin: str, names: int = 2) -> dict[str, dict[str, str]]:
    """The table that is written under ``begin``: its cells by the first of so many names of a row, and by column."""
    lines = page.partition(begin)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0][names:], row[names:], strict=True)) for row in rows[2:]}


def put(page: str, begin: str, rows: Iterable[Iterable[str]]) -> None:
    """Write the page with this table under ``begin``."""
    before, _, rest = page.partition(begin)
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    PAGE.write_text(before + begin + lines + END + rest.partition(END)[2], encoding="utf-8")


def write(row: str, new: Mapping[str, str], begin: str = CHECKED, columns: Iterable[str] = PAIR_CHECKS) -> None:
    """Put some cells into a row of the page's table; another process may have changed the others meanwhile."""
    page, columns = PAGE.read_text(encoding="utf-8"), list(columns)
    of = {ON_PYTHON: (("Python", "torch"), PYTHONS), WITH_MODELS: (("transformers", "torch"), TRANSFORMERS)}
    names, releases = of.get(begin, (("torch", "torch_npu"), pairs()))
    known = cells(page, begin)
    known[row] = known.get(row, {}) | dict(new)
    rows = [
        [*names, *columns],
        ["---"] * (2 + len(columns)),
        *(
            [*release, *(known.get(release[0], {}).get(name, "not run") for name in columns)]
            for release in releases.items()
        ),
    ]
    put(page, begin, rows)


def main() -> int:
    """Run what was asked for.

    Returns:
        0, or 1 where a check failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--torch", action="append", choices=pairs(), help="a release; all if left out")
    rows.add_argument("--python", action="append", choices=PYTHONS, help="a release of Python, in place of --torch")
    rows.add_argument("--transformers", action="append", choices=TRANSFORMERS, help="a release of transformers")
    parser.add_argument(
        "--checks", action="append", choices=[*CHECKS, "speed", "lifted"], help="a column; all if left out"
    )
    parser.add_argument("--environment", type=Path, help="an environment for the only row, instead of tox's")
    parser.add_argument("--work", type=Path, default=ROOT / ".tox" / "matrix", help="the folder of logs and reports")
    parser.add_argument("--keep-page", action="store_true", help="run, and leave the table as it is")
    parser.add_argument("--resume", action="store_true", help="keep the parts that passed before, by their logs")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes; 2 if left out")
    options = parser.parse_args()
    chosen = options.python or options.transformers or options.torch or list(pairs())
    if options.environment is not None and len(chosen) != 1:
        parser.error("--environment is of one row: say which, by --torch, --python or --transformers")
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    failed = False
    table, columns, other = CHECKED, PAIR_CHECKS, ("speed",)
    if options.python or options.transformers:
        table, columns, other = (
            (ON_PYTHON, PYTHON_CHECKS, ()) if options.python else (WITH_MODELS, MODEL_CHECKS, ("lifted",))
        )
    for row in chosen:
        if options.python and options.environment is None and shutil.which(f"python{row}") is None:
            print(f"NOT TESTED: there is no python{row} here; its row stays as it is")
            continue
        for check in options.checks or (*columns, *other):
            if check == "lifted":
                failed = lifted(row, options) or failed
                continue
            if check == "speed":
                speeds = time(row, options)
                write(row, speeds, TIMED, speeds)
                continue
            cell = run(row, check, options)
            failed = failed or cell.startswith("**")
            if not options.keep_page:
                write(row, {check: cell}, table, columns)  # after each check: the whole takes hours
    if not options.keep_page:
        print(PAGE.read_text(encoding="utf-8").partition(table)[2].partition(END)[0])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
