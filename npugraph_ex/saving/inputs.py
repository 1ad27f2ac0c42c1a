"""The inputs of a saved graph: encoded at the compilation, checked at every call.

Nothing is broadcast, converted or specialised: an input of another shape, dtype or device raises, and the message names the
input, the expected and the actual value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from npugraph_ex.errors import SavedGraphError
from npugraph_ex.saving.sizes import Condition, SymbolicSizes
from npugraph_ex.saving.values import Json, Unsaveable
from npugraph_ex.versions.symbol_values import symbol_values


def encode_inputs(values: Sequence[Any], names: Sequence[str]) -> list[Json]:
    """Encode the example inputs of a graph.

    Args:
        values: the fake tensor or number of each placeholder.
        names: the input names for messages.

    Raises:
        Unsaveable: an input that is neither a tensor nor a whole number.
    """
    return [_encode(value, name) for value, name in zip(values, names, strict=True)]


def _encode(value: Any, name: str) -> Json:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type == "meta":
            raise Unsaveable(f"the input {name} is a tensor of layout {value.layout} on {value.device}")
        return {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
            "size": [_size(number) for number in value.size()],
            "stride": [_size(number) for number in value.stride()],
            "offset": _size(value.storage_offset()),
        }
    if isinstance(value, torch.SymInt):
        size = _size(value)
        return {"name": name, "symbol": str(size), **({"number": size} if isinstance(size, int) else {})}
    if type(value) is int:
        return {"name": name, "number": value}
    raise Unsaveable(f"the input {name} is {value!r}, neither a tensor nor a whole number")


def _size(number: int | torch.SymInt) -> int | str:
    """A number, or an expression; a symbol whose value the trace needed is that number, which no condition names any more."""
    if isinstance(number, int):
        return number
    expression = number.node.expr
    return int(expression) if expression.is_number else str(expression)


def hints_of(values: Sequence[Any]) -> dict[str, int]:
    """The symbols in the sizes of inputs, each with its value in the example.

    Raises:
        Unsaveable: a symbol without a value, which comes from data and not from an input; or one that stands for many sizes.
    """
    hints: dict[str, int] = {}
    sizes = [
        number
        for value in values
        for number in ((*value.size(), *value.stride()) if isinstance(value, torch.Tensor) else (value,))
        if isinstance(number, torch.SymInt)
    ]
    for number in sizes:
        environment = number.node.shape_env
        for symbol in number.node.expr.free_symbols:
            value = symbol_values(environment).get(symbol)
            if value is None:
                raise Unsaveable(f"the size {number} is known only when the graph runs")
            if not sympy.sympify(value).is_Integer:
                raise Unsaveable(f"the size {number} is that of a nested tensor, and no number")
            hints[str(symbol)] = int(value)
    return hints


def fake_inputs(spelt: Sequence[Json], sizes: SymbolicSizes, home: torch.device) -> list[Any]:
    """Undo `encode_inputs`: fake tensors and symbolic numbers, in the fake mode of ``sizes``."""
    return [_decode(entry, sizes, home) for entry in spelt]


def _decode(entry: Json, sizes: SymbolicSizes, home: torch.device) -> Any:
    if "number" in entry:
        return entry["number"]
    if "symbol" in entry:
        return sizes.size(entry["symbol"])
    size = [sizes.size(number) for number in entry["size"]]
    stride = [sizes.size(number) for number in entry["stride"]]
    dtype = getattr(torch, entry["dtype"])
    device = home if entry["device"] == home.type else torch.device(entry["device"])
    with sizes.mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class InputCheck:
    """Raises for inputs that do not fit a saved graph.

    Args:
        spelt: what `encode_inputs` returned.
        condition: the condition on the symbolic sizes.
    """

    def __init__(self, spelt: Sequence[Json], condition: Condition) -> None:
        self._entries = list(spelt)
        self._dtypes = [getattr(torch, entry["dtype"]) if "dtype" in entry else None for entry in spelt]
        self._fixed = [
            (tuple(entry["size"]), tuple(entry["stride"])) if "dtype" in entry and _is_fixed(entry) else None
            for entry in spelt
        ]
        self._condition = condition
        # The condition counts tensors and what was a symbol at first.
        self._numbered = [position for position, entry in enumerate(spelt) if "dtype" in entry or "symbol" in entry]

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Raise ``SavedGraphError`` unless the graph was compiled for such inputs."""
        if len(inputs) != len(self._entries):
            raise SavedGraphError(f"the saved graph takes {len(self._entries)} inputs, got {len(inputs)}")
        for value, dtype, fixed, entry in zip(inputs, self._dtypes, self._fixed, self._entries, strict=True):
            if dtype is None:
                self._check_number(value, entry)
            elif (
                not isinstance(value, torch.Tensor)
                or value.dtype is not dtype
                or value.device.type != entry["device"]
                or value.dim() != len(entry["size"])
                or ((value.size(), value.stride()) != fixed and not _same_layout(value, entry["size"], entry["stride"]))
            ):
                raise SavedGraphError(_refusal(entry, value))
        checked = [inputs[position] for position in self._numbered]
        if not self._condition.holds(checked):
            names = [self._entries[position]["name"] for position in self._numbered]
            shapes = ", ".join(f"{e['name']} is {_described(v)}" for e, v in zip(self._entries, inputs, strict=True))
            raise SavedGraphError(
                f"the saved graph was compiled for sizes with {self._condition.broken(checked, names)}; "
                f"here {shapes}. Compile anew for these"
            )

    @staticmethod
    def _check_number(value: Any, entry: Json) -> None:
        expected = entry.get("number")
        if type(value) is not int or (expected is not None and value != expected):
            raise SavedGraphError(_refusal(entry, value))


def _is_fixed(entry: Json) -> bool:
    return all(isinstance(number, int) for number in (*entry["size"], *entry["stride"]))


def _same_layout(value: torch.Tensor, size: Sequence[int | str], stride: Sequence[int | str]) -> bool:
    """Whether sizes and strides are the encoded ones; the condition checks symbolic ones.

    The stride of a dimension with one element does not count, because no operator looks at it.
    """
    if any(length != spelt for length, spelt in zip(value.size(), size, strict=True) if isinstance(spelt, int)):
        return False
    return value.numel() == 0 or all(
        step == spelt or length == 1 or not isinstance(spelt, int)
        for step, spelt, length in zip(value.stride(), stride, value.size(), strict=True)
    )


def _refusal(entry: Json, value: object) -> str:
    if "dtype" in entry:
        sizes = ", ".join(map(str, entry["size"]))
        strides = ", ".join(map(str, entry["stride"]))
        expected = f"{entry['dtype']}[{sizes}] with strides [{strides}] on {entry['device']}"
    else:
        expected = str(entry["number"]) if "number" in entry else f"a whole number ({entry['symbol']})"
    return (
        f"the saved graph takes {expected} as {entry['name']}, got {_described(value)}. Compile anew for other inputs"
    )


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{value!r}"
    sizes, strides = ", ".join(map(str, value.size())), ", ".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}] with strides [{strides}] on {value.device.type}"
