"""What one test came to, and under which cause failures are counted together."""

from __future__ import annotations

import re
from typing import NamedTuple

CALL, LIMIT, CRASH = "call", "limit", "crash"
_LONGEST = 110
_NO_KERNEL_CAUSE = "no kernel for "
_NO_KERNEL = re.compile(r"no kernel for (\w+::[\w.]+)")
_NOT_COVERED = re.compile(r"(\w+): the reference does not cover (\w+)=")
_OTHER_VALUE = re.compile(
    r"not close|[Mm]ismatch|not equal|Not equal|!=|is not true|is not false|not less|not greater|^assert|^$|differ"
)
_BY_TORCH_NPU = {
    "None": "another value",
    "result error": "another value",
    "shape error": "another shape",
    "dtype error": "another dtype",
}
"""What torch_npu's `assertRtolEqual` says, and what it found."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|(?<![\w])-?\d+(\.\d+)?([eE][-+]?\d+)?")


class UpstreamOutcome(NamedTuple):
    """One test.

    Attributes:
        file: below the checkout's folder of tests.
        test: ``Class::test``; empty for the file as a whole.
        chip: the emulated chip that it ran on.
        state: ``"passed"``, ``"failed"`` or ``"skipped"``.
        cause: of a failure, or the reason of a skip; failures with one cause are counted together.
        message: what the test said.
        line: of the file, at which the test failed; 0 where nothing tells.
        known: why the failure is no fault; empty where nothing explains it.
        kind: of what kind that reason is; `known` lists the kinds.
    """

    file: str
    test: str
    chip: str
    state: str
    cause: str = ""
    message: str = ""
    line: int = 0
    known: str = ""
    kind: str = ""

    @property
    def uncovered(self) -> str:
        """Why the operator of a failed test is none that this torch_npu and this device have; empty where it is one."""
        no_kernel = self.cause.startswith(_NO_KERNEL_CAUSE)
        return "no kernel" if no_kernel else self.kind if self.kind in {"absent", "devices"} else ""

    @property
    def name(self) -> str:
        """``file::Class::test``."""
        return f"{self.file}::{self.test}" if self.test else self.file

    @property
    def said(self) -> str:
        """Where a failed test stopped, and the first line of what it said; the cause where it said nothing."""
        first = next((line.strip() for line in self.message.splitlines() if line.strip()), "None")
        text = self.cause if first == "None" or first.rstrip("!") in _BY_TORCH_NPU else first
        return f"line {self.line}: {text}" if self.line else text


def cause_of(kind: str, message: str) -> str:
    """The cause of a failure, from the exception's class and message."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    missing, uncovered = _NO_KERNEL.search(message), _NOT_COVERED.search(message)
    if missing:
        return f"{_NO_KERNEL_CAUSE}{missing[1]}"
    if uncovered:
        return f"not covered: {uncovered[1]}({uncovered[2]}=)"
    if kind == "AssertionError":
        if "not raised" in first or "DID NOT RAISE" in first:
            return "no error where one is expected"
        if "does not match" in first:
            return "another error message"
        if first.rstrip("!") in _BY_TORCH_NPU:
            return _BY_TORCH_NPU[first.rstrip("!")]
        if _OTHER_VALUE.search(message):
            return "another value"
    text = _VARYING.sub("N", f"{kind}: {first}" if first else kind)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
