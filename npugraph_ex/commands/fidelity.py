"""`npugraph-ex fidelity`: does a device obey the rules that the emulated device is built on? One file of its answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.suites import require
from npugraph_ex.commands.terminal import remark, say_written, show
from npugraph_ex.console.interrupts import end_children, interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError

if TYPE_CHECKING:
    from npugraph_ex.testing.targets import Target
    from npugraph_ex_conformance.fidelity.rule import DeviceRule

_VARIABLE = "NPU_EMULATOR_AS_MEASURED"
_DESCRIPTION = """\
Ask a device, rule by rule, for what the emulated device is built on: error codes, what a capture refuses, order, allocator,
random numbers, updates of captured tasks, formats. Prints the rules that it does not obey; --output writes all answers to a file.

examples:
  npugraph-ex fidelity                                       the emulated device beside its own rules
  npugraph-ex fidelity --target npu --output npu.json        a real device; the file can be compared with later
  npugraph-ex fidelity --as-measured npu.json -k capture.    the emulated device with that one's errors: what still differs

exit status: 0 all answers are those of the rules (or of --as-measured), 1 some differ or have nothing to be compared with,
2 wrong use, 130 after Ctrl-C (what was asked before it is printed and written)
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "fidelity", help="does a device obey the rules of the emulated one?", description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument(
        "--target", choices=("emulated", "npu"), default="emulated", help="which device (default: emulated)"
    )
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only rules with this word in their name, as in capture."
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="where the answers go")
    parser.add_argument(
        "--as-measured", type=Path, metavar="FILE",
        help="compare with the answers of another device in FILE; the emulated device gives its errors, where they are data",
    )  # fmt: skip


def _switched(
    asked: Sequence[DeviceRule],
    answers: Mapping[str, Any],
    expected: Mapping[str, Any],
    differing: Sequence[DeviceRule],
) -> list[str]:
    """The rules that the emulated device took from the file, and what that means for those that differ."""
    switched = [rule for rule in asked if answers[rule.name] == expected.get(rule.name, rule.answer) != rule.answer]
    lines = [f"AS MEASURED {rule.name}: {answers[rule.name]!r} in place of {rule.answer!r}" for rule in switched]
    if differing and any(rule.answer != expected[rule.name] for rule in differing):
        lines.append("what differs from the file is no data of the emulated device, and cannot be switched")
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Ask, print what differs, and write the file."""
    require("the rules need", {"hypothesis": "hypothesis"}, "conformance")
    from npugraph_ex.testing.targets import start_target
    from npugraph_ex_conformance.fidelity.table import read

    measured: Mapping[str, Any] | None = read(arguments.as_measured) if arguments.as_measured is not None else None
    with _answering_as(arguments.as_measured):
        return _ask_all(arguments, start_target(arguments.target), measured)


@contextmanager
def _answering_as(file: Path | None) -> Iterator[None]:
    """Let emulated devices that start in the block answer as a file says. No other target reads the variable."""
    before = os.environ.get(_VARIABLE)
    if file is not None:
        os.environ[_VARIABLE] = str(file.resolve())
    try:
        yield
    finally:
        if before is not None:
            os.environ[_VARIABLE] = before
        else:
            os.environ.pop(_VARIABLE, None)


def _ask_all(arguments: argparse.Namespace, target: Target, measured: Mapping[str, Any] | None) -> int:
    """Ask the target for each rule, and say what differs from the rules, or from what was measured."""
    from npugraph_ex_conformance.campaign.fidelity import ask
    from npugraph_ex_conformance.fidelity.table import all_rules

    rules = {number: rule for number, rule in enumerate(all_rules()) if arguments.k in rule.name}
    if not rules:
        parts = sorted({f"{rule.name.partition('.')[0]}." for rule in all_rules()})
        raise UsageError(f"no rule has {arguments.k!r} in its name; they begin with {', '.join(parts)}")
    remark(arguments, f"{target.describe()}\n")
    answers: dict[str, Any] = {}
    with interruptible() as stop, progress(len(rules), quiet=arguments.quiet) as reached:
        try:
            for name, answer in ask(rules, arguments.target):
                answers[name] = answer
                reached(len(answers), name)
                stop.check()
        except KeyboardInterrupt:
            end_children()
    asked = [rule for rule in rules.values() if rule.name in answers]
    expected = {rule.name: rule.answer for rule in asked} if measured is None else measured
    missing = [rule.name for rule in asked if rule.name not in expected]
    differing = [rule for rule in asked if rule.name in expected and answers[rule.name] != expected[rule.name]]
    basis = "rule" if measured is None else "measured"
    lines = [
        f"DIFFERS {rule.name}: {rule.says}\n  source: {rule.source}\n"
        f"  here: {answers[rule.name]!r}; {basis}: {expected[rule.name]!r}"
        for rule in differing
    ]
    lines += _switched(asked, answers, expected, differing)
    assumed = sum(rule.is_assumed for rule in asked)
    lines.append(f"{len(asked)} rules, {assumed} of them only assumed; {len(differing)} differ")
    if missing:
        lines.append(f"{len(missing)} are not in {arguments.as_measured} and were not compared: {', '.join(missing)}")
    found = {"device": target.device, "kind": target.kind, "versions": dict(target.versions), "answers": answers}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        say_written(arguments, arguments.output)
    show(
        arguments, {**found, "differing": [rule.name for rule in differing], "not_compared": missing}, "\n".join(lines)
    )
    if stop.number:
        sys.stderr.write(f"npugraph-ex: stopped by {stop} after {len(asked)} of {len(rules)} rules\n")
        return stop.status
    return int(bool(differing or missing))
