"""Whether formulas take what documents list: each value goes into a record's example calls in place of the example's own.

A value that a call refuses is tried once more beside each other listed value of the operator's names, numbers and dtypes, because
modes depend on each other. What no example can show, such as a tensor that none of them has, is skipped with its reason.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from npugraph_ex.operators import CODE_OF_DTYPE, OPERATORS, Operator, RefusedArgumentError, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import encode
from npugraph_ex.operators._int4 import pack as pack_int4
from npugraph_ex.operators._microscaling import E2M1, BlockQuantisation, pack, rounded
from npugraph_ex_conformance.upstream.documents import DTYPES, Listed
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome, cause_of

_CODES = {
    "hifloat8": 290,
    "float4_e2m1fn_x2": 296,
    "float8_e8m0fnu": 293,
    "int4": 285,
    "quint4x2": 16,
    "float": 6,
    "double": 7,
}
_STORED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hifloat8": lambda x: encode(x.float(), saturate=True),
    "float4_e2m1fn_x2": lambda x: pack(rounded(x.float(), BlockQuantisation(E2M1)), E2M1),
    "int4": lambda x: pack_int4("documents", x.clamp(-8, 7).to(torch.int8)),
}
_Arguments = dict[str, Any]


def answers(values: Iterable[Listed]) -> Iterator[UpstreamOutcome]:
    """One outcome a value: the operator as file, ``argument=value`` as test."""
    for name, group in itertools.groupby(values, lambda one: one.operator):
        of_operator = [*group]
        record = next(
            (OPERATORS[full] for full in OPERATORS if full.partition(".")[0] in {f"npu::{name}", f"atb::{name}"}), None
        )
        for one in of_operator:
            state, message, cause = (
                ("skipped", "", "no record of the operator") if record is None else _ask(record, one, of_operator)
            )
            yield UpstreamOutcome(name, f"{one.argument}={one.value}", "", state, cause, message)


def _ask(record: Operator, one: Listed, others: Sequence[Listed]) -> tuple[str, str, str]:
    """State, message and cause."""
    formula = record.formula
    if formula is None:
        return "skipped", "", "no formula in the record"
    names = [*inspect.signature(formula).parameters]
    first = one.argument not in names and one.argument == others[0].argument  # which documents often call otherwise
    argument = names[0] if first else one.argument
    if argument not in names:
        return "skipped", "", "no such argument in the record"
    one, errors = one._replace(argument=argument), []
    for call in _attempts(record, one, [other for other in others if other.argument in names], names):
        try:
            formula(**call)
        except Exception as error:  # noqa: BLE001 - whatever a formula raises is an answer
            errors.append(error)
        else:
            return "passed", "", ""
    if not errors:
        return "skipped", "", "no example has the tensor"
    named = [
        error
        for error in errors
        if argument in str(error) and isinstance(error, (UnsupportedArgumentError, RefusedArgumentError))
    ]
    if not named:
        return "skipped", str(errors[0]), "no example fits the value"
    return "failed", str(named[0]), cause_of(type(named[0]).__name__, str(named[0]))


def _attempts(record: Operator, one: Listed, others: Sequence[Listed], names: Sequence[str]) -> Iterator[_Arguments]:
    """The record's calls with the value: by itself first, then beside each other listed name, number and dtype."""
    modes = [other for other in others if not other.type.startswith("Tensor") and other.argument != one.argument]
    for beside in (None, *modes):
        for together in (False, True):
            for args, kwargs in record.calls():
                call = {**dict(zip(names, args, strict=False)), **kwargs}
                if beside is not None:
                    call[beside.argument] = _scalar(beside)
                changes = _changed(call, one, names, together=together)
                if changes is not None:
                    yield {**call, **changes}


def _changed(call: _Arguments, one: Listed, names: Sequence[str], *, together: bool) -> _Arguments | None:
    """The arguments to change: the one alone, or with those of its dtype; None where the call does not have the tensor."""
    if not one.type.startswith("Tensor"):
        named = one._replace(argument=one.argument.removesuffix("_dtype"), type="Tensor")
        told = {one.argument: _scalar(one)}
        if named.argument == one.argument or one.value not in DTYPES.split("|"):
            return told
        return (
            _changed(call, named, names, together=together) or {}
        ) | told  # the tensor whose dtype the argument tells
    given = call.get(one.argument)
    first = given[0] if isinstance(given, (list, tuple)) and given else given
    if not isinstance(first, torch.Tensor):
        return None
    dtype = first.dtype
    same = [name for name in names if isinstance(call.get(name), torch.Tensor) and call[name].dtype == dtype]
    changed: _Arguments = {}
    for name in {one.argument, *same} if together else {one.argument}:
        value = call[name]
        changed[name] = (
            [_stored(each, one.value) for each in value]
            if isinstance(value, (list, tuple))
            else _stored(value, one.value)
        )
        if one.value in {"hifloat8", "float4_e2m1fn_x2"} and f"{name}_dtype" in names:
            changed[f"{name}_dtype"] = _CODES[one.value]
    return changed


def _stored(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return _STORED[dtype](x) if dtype in _STORED else x.to(getattr(torch, dtype))


def _scalar(one: Listed) -> object:
    """The value itself; a dtype by its number."""
    if one.value in DTYPES.split("|"):
        if one.type == "ScalarType":  # a dtype of torch itself, where int4 is quint4x2
            return getattr(torch, {"int4": "quint4x2"}.get(one.value, one.value))
        return _CODES.get(one.value) or CODE_OF_DTYPE.get(getattr(torch, one.value))
    if one.type == "bool":
        return one.value == "True"
    return int(one.value) if one.value.lstrip("-").isdigit() else one.value
