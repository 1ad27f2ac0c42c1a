"""Why a function was compiled again: the guard that Dynamo names, in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch

from npugraph_ex.report.names import program_name

_TENSOR = r"tensor '(?P<name>.+?)' "
_FORMS = (
    (
        rf"{_TENSOR}dtype mismatch\. expected (?P<old>\w+), actual (?P<new>\w+)",
        "the dtype of {name} was {old} and is {new}",
    ),
    (
        rf"{_TENSOR}(?P<what>size|stride) mismatch at index (?P<at>\d+)\. expected (?P<old>\S+), actual (?P<new>\S+)",
        "the {what} {at} of {name} was {old} and is {new}",
    ),
    (
        rf"{_TENSOR}rank mismatch\. expected (?P<old>\d+), actual (?P<new>\d+)",
        "the number of dimensions of {name} was {old} and is {new}",
    ),
    (
        r"expected type of '(?P<name>.+?)' to be a tensor type, '?\s*but found <class '(?P<new>.+?)'>",
        "{name} was a tensor and is of type {new}",
    ),
    (r"TYPE_MISMATCH\((?P<name>.+)\)", "{name} is of another type than it was"),
    (rf"{_TENSOR}requires_grad mismatch\. expected requires_grad=1", "{name} required a gradient and does not now"),
    (rf"{_TENSOR}requires_grad mismatch\. expected requires_grad=0", "{name} required no gradient and does now"),
    (
        rf"{_TENSOR}dispatch key set mismatch\.",
        "{name} is another kind of tensor: device, view or inference mode differ",
    ),
    (
        r"___check_type_id\((?P<name>.+), \d+\), type=<class '(?P<old>.+?)'>",
        "{name} was of type {old} and is of another type",
    ),
    (r"___check_obj_id\((?P<name>.+), \d+\)", "{name} is another object than it was"),
    (r"___check_current_backend\(|BACKEND_MATCH failure", "torch.compile was called again, with other options"),
    (r"GLOBAL_STATE changed: (?P<what>.+)", "torch's own state changed: {what}"),
    (r"(?P<what>.*)", "{what} was true and is not now"),
)
"""How Dynamo spells a guard that failed, and what it means. The last form is a condition as Python's text."""


def in_words(reason: str, pinned: Mapping[tuple[str, int], str] = MappingProxyType({})) -> str:
    """What changed, and the line of the program that asked; empty where there is no reason.

    Args:
        reason: Dynamo's, such as ``0/1: n == 2  # return x * n  # model.py:7 in forward``.
        pinned: sizes that became constants while Dynamo traced, and the line that needed the value.
    """
    if not reason or reason.startswith("Unable to find"):
        return reason and "a guard failed, and torch does not say which"
    first, *comments = re.split(r"\s+#\s", re.sub(r"^\d+/\d+: ", "", reason.splitlines()[0]))
    first = program_name(first)
    said = next(
        template.format(**{key: _name(value) for key, value in found.groupdict().items()})
        for form, template in _FORMS
        if (found := re.match(form, first.strip()))
    )
    # Torch cuts the beginning of a path off, so that the file's own name is all of it that is certain.
    notes = [f"used at {found[1]}" for text in comments if (found := re.match(r"(?:\S*/)?(\S+:\d+) in ", text))]
    for (name, at), line in pinned.items():
        if said.startswith(f"the size {at} of {program_name(name)} was "):
            code, _, place = line.partition("  # ")
            shown = f"`{code.strip()}`" if code.strip() else "the line"  # of a program without a file
            notes.append(f"{shown} at {place.partition(' in ')[0].rpartition('/')[2]} needs its value")
    if "0/1 specialization" in reason:
        notes.append("torch compiles for the sizes 0 and 1 anew")
    return f"{said} ({', '.join(notes)})" if notes else said


def _name(text: str) -> str:
    """``Half`` as ``torch.float16``, which is what programs write."""
    dtype = getattr(torch, text.lower(), None)
    return str(dtype) if isinstance(dtype, torch.dtype) and text[0].isupper() else text.strip()
