"""What a session says where torch or the compiler refuses a function: one sentence in the words of the user's program."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from npugraph_ex._plurals import counted
from npugraph_ex._torch_private import LastingChange
from npugraph_ex.errors import CaptureError

_SHOWN = 3
_REQUIRED = "the option require_capture is on, and this graph cannot be captured"
_OWN_FRAME = re.compile(r' *File "[^"]*decode_session\.py", line \d+.*\n(?: {4}.*(?:\n|\Z))*')


def capture_refusal(error: Exception) -> CaptureError | None:
    """The refusal of a capture, if the error is one; Dynamo wraps what its backend raises."""
    inner = getattr(error, "inner_exception", error)
    return inner if isinstance(inner, CaptureError) else None


def reason(error: Exception, name: str) -> str:
    """Why the function of this name cannot be a session, or cannot be captured: what was wrong, and what to do."""
    inner = getattr(error, "inner_exception", error)
    said = str(inner).strip() or type(inner).__name__
    if "certain side effects happened" in said:
        listed = said.partition("double check:")[2].partition("\n")[0].strip()
        return changes([*map(LastingChange, ast.literal_eval(listed) if listed.startswith("[") else ())], name)
    said = re.split(r"\n+(?:Set TORCHDYNAMO_VERBOSE|help: )", said)[0].replace(
        _REQUIRED, "the device cannot capture its graph"
    )
    said = _OWN_FRAME.sub("", said).removesuffix("from user code:\n").rstrip()
    return _in_users_words(said, name)


def unfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a function's signature does not take these arguments; empty if it does, or if the function does not tell."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # something built in
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [*([counted(len(args), "positional argument")] if args else []), *(f"{name}=" for name in kwargs)]
        return f"It takes {signature}, and the call has {' and '.join(given) or 'no arguments'}: {error}"
    return ""


def core_of(error: Exception) -> str:
    """What the program raised, or an operator that refused its arguments, while Dynamo compiled; or the first line of any error."""
    said = str(getattr(error, "inner_exception", error)).strip() or type(error).__name__
    found = re.search(
        r"(?:with fake tensors: (?s:.*?)\bgot|debug context: raised exception) (\w+\(.*\))$", said, re.MULTILINE
    )
    return found[1] if found else said.partition("\n")[0]


def changes(listed: Sequence[LastingChange], name: str) -> str:
    """What a function changes, with the remedy."""
    changed = dict.fromkeys(_changed(change.name, name) for change in listed)
    what = _some(list(changed)) or "something besides its results and the contents of tensors"
    told = [f"its code changes {what}, which a replay would not do: it runs work of the device alone"]
    counter = next((change for change in listed if change.counter_of), None)
    if counter is not None:
        told.append(
            f"{counter.name.rpartition('.')[2]} is a number that {counter.counter_of} keeps on the host. Give the call an object "
            "that keeps it in a tensor, or needs none: docs/how-to/sessions.md#sliding-windows does so with a cache of transformers"
        )
    else:
        told.append(
            "Write into a tensor in place (`self.total.add_(x)`; `self.total += x` sets the attribute), or return the new value. "
            "What has its old value again at the end of the call may change in between"
        )
    if any(change.is_new for change in listed):
        told.append(
            f"What only a first call sets, such as the memory of a cache, needs such a call before: call {name} once"
        )
    return ". ".join(told)


def _some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = names if len(names) <= _SHOWN + 1 else names[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(shown) < len(names) else "")


def _changed(source: str, name: str) -> str:
    of_all = re.fullmatch(r"G\['([\w.]+)'\]\.?(.*)", source)
    if of_all:
        return (
            f"the global variable {of_all[2]} of the module {of_all[1]}"
            if of_all[2]
            else f"the global variable {of_all[1]}"
        )
    source = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", source)
    of_module = re.fullmatch(r"(.+)\._(buffer|parameter|module)s", source)
    if of_module:
        return f"a {of_module[2]} of {_in_users_words(of_module[1], name)}"
    said = _in_users_words(source, name)
    return f"an attribute of {said}" if said == name else said


def _in_users_words(text: str, name: str) -> str:
    """The names of a session's function and of its arguments, as the caller has them."""
    text = re.sub(r"L\['(function|args|kwargs)'\]|^ *(function|args|kwargs)(?=[.\[])", _root, text, flags=re.MULTILINE)
    text = re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text)
    text = re.sub(r"<arguments>\[('?\w+'?)\]", r"argument \1", text)
    return text.replace("<the function>", name)


def _root(found: re.Match[str]) -> str:
    """Dynamo's name of what the arguments and the function's state come from, marked."""
    kind = found[1] or found[2]
    return found[0].removesuffix(found[0].lstrip()) + ("<the function>" if kind == "function" else "<arguments>")
