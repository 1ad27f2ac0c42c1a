"""Examples about operators of another library that do more than their schemas say, beside writes, views and honest operators.

An operator may return its argument or a view of it, write it, or both, and declare nothing of it. Others declare what they write,
and get the same tensor, or a part of it, as another argument, too. A random program of integers calls some, compiled and in eager
mode, with tensors that stay and with new ones. Every call must give eager mode's integers and leave them in the arguments, the
first one too; so must a write into a result between two calls. An error would be wrong: eager mode can always run the program.

Some programs run in inference mode, where torch counts no writes: they call no operator that writes undeclared. Some operators
return a tensor whose strides differ from the declared ones where they lead nowhere: beside a size of one, or in an empty tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from npugraph_ex import _torch_private

_SIZE, _HALF, _CALLS, _MOST_STEPS = 4, 2, 5, 7
_WITH_NEW_TENSORS, _WRITTEN_AFTER = 1, 3
"""The call that gets new tensors, and the one after which the caller writes into the first result."""


def _write(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(y)


def _write_both(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(1)
    y.mul_(2)


def _write_and_read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.add_(x.sum(dtype=x.dtype))
    return x * 2


def _write_and_read_list(xs: Sequence[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    xs[0].mul_(2)
    return y + xs[1].sum(dtype=y.dtype)


def _column(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).as_strided((x.shape[0], 1), (1, 7))


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0).as_strided((0, 3), (1, 7))


_KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "doubled": ("(Tensor x) -> Tensor", lambda x: x * 2),
    "same": ("(Tensor x) -> Tensor", lambda x: x),
    "half": ("(Tensor x) -> Tensor", lambda x: x[:_HALF]),
    "bumped": ("(Tensor x) -> Tensor", lambda x: x.add_(1) * 2),
    "bumped_same": ("(Tensor x) -> Tensor", lambda x: x.add_(1)),
    "column": ("(Tensor x) -> Tensor", _column),
    "nothing": ("(Tensor x) -> Tensor", _nothing),
    "put": ("(Tensor(a!) x, Tensor y) -> ()", _write),
    "put_both": ("(Tensor(a!) x, Tensor(b!) y) -> ()", _write_both),
    "told": ("(Tensor x, Tensor(a!) y) -> Tensor", _write_and_read),
    "told_list": ("(Tensor(a!)[] xs, Tensor y) -> Tensor", _write_and_read_list),
}
"""Schemas and what the operators do. The first and those behind ``bumped_same`` are honest."""
_STEPS = ("add", "add", "mul", "write", "view", "detach", *_KERNELS)
_COUNTED = ("bumped", "bumped_same")
"""Operators that write undeclared, which shows only where torch counts writes."""


_numbers = count()


@contextmanager
def _operators() -> Iterator[Any]:
    """The operators under a name that nobody has used, so that nothing is known of them."""
    namespace = f"npugraph_ex_undeclared_{next(_numbers)}"
    with _torch_private.scoped_library(namespace) as library:
        for name, (schema, kernel) in _KERNELS.items():
            library.define(name + schema)
            library.impl(name, kernel, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", _fake(name), lib=library)
        yield getattr(torch.ops, namespace)


def _fake(name: str) -> Callable[..., Any]:
    if name.startswith("put"):
        return lambda x, y: None  # noqa: ARG005 - by the schema
    if name == "told_list":
        return lambda xs, y: torch.empty_like(y)  # noqa: ARG005 - by the schema
    if name == "told":
        return lambda x, y: torch.empty_like(x)  # noqa: ARG005 - by the schema
    if name in ("column", "nothing"):
        return lambda x: x.new_empty((x.shape[0], 1) if name == "column" else (0, 3))
    return lambda x: x.new_empty(_HALF if name == "half" else x.shape[0])


def undeclared_effect_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    inference = seed % 4 == 1
    text = _program(random.Random(seed), [one for one in _STEPS if not (inference and one in _COUNTED)])
    with _operators() as operators:
        space: dict[str, Any] = {"op": operators}
        exec(text, space)  # noqa: S102 - the text was written above
        torch.compiler.reset()
        meant = _calls(space["program"], inference=inference)
        try:
            options: dict[str, Any] = {"force_eager": seed % 3 == 0}
            found = _calls(torch.compile(space["program"], backend="npugraph_ex", options=options), inference=inference)
        except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
            return f"raised {type(error).__name__}: {error}\n{text}"
    for number, (is_so, should_be) in enumerate(zip(found, meant, strict=True)):
        if is_so != should_be:
            return f"replay, call {number}: results and arguments {is_so} instead of {should_be}\n{text}"
    return ""


def _program(draw: random.Random, all_steps: Sequence[str]) -> str:
    sizes, steps = {"x": _SIZE, "y": _SIZE}, []
    for number in range(draw.randint(2, _MOST_STEPS)):
        what, value, name = draw.choice(all_steps), draw.choice([*sizes]), f"v{number}"
        size = sizes[value]
        other, third = draw.choice([one for one, its_size in sizes.items() if its_size == size]), draw.choice([*sizes])
        if what in ("write", "put", "put_both"):
            steps.append(f"{value}.add_({number + 1})" if what == "write" else f"op.{what}({value}, {other})")
            continue
        if what == "view" and size > 1:
            size -= 1
        if what == "half":
            size = min(size, _HALF)
        sizes[name] = size
        text = {
            "add": f"{value} + {other}",
            "mul": f"{value} * 3",
            "view": f"{value}[-{size}:]",
            "detach": f"{value}.detach()",
            "column": f"op.column({value}).flatten()",
            "nothing": f"{value} + op.nothing({value}).sum()",
            "told": f"op.told({value}, {third})",
            "told_list": f"op.told_list([{third}, {other}], {value})",
        }
        steps.append(f"{name} = {text.get(what, f'op.{what}({value})')}")
    made = [name for name in sizes if name.startswith("v")] or ["x + y"]
    results = draw.sample(made, min(len(made), draw.randint(1, 3)))
    lines = "".join(f"    {step}\n" for step in steps)
    return f"def program(x, y):\n{lines}    return ({', '.join(results)},)\n"


def _calls(function: Callable[..., Any], *, inference: bool) -> list[list[list[int]]]:
    """The integers in results and arguments after each call, and after the caller's write."""
    seen = []
    with torch.inference_mode() if inference else torch.no_grad():
        stay = [torch.arange(_SIZE, dtype=torch.int32, device="npu") * step for step in (1, 10)]
        for call in range(_CALLS):
            given: Sequence[torch.Tensor] = [one.clone() for one in stay] if call == _WITH_NEW_TENSORS else stay
            results = function(*given)
            seen.append([one.tolist() for one in (*results, *given)])
            if call == _WRITTEN_AFTER:
                results[0].add_(100)
                seen.append([one.tolist() for one in (*results, *given)])
    return seen
