"""What the graphs of `saved_graphs.py` are made of: constants of every layout, and pieces that read them and two tensors."""

# Every piece takes the same.
# ruff: noqa: ARG005

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

WIDTH = 4
"""The columns of all tensors."""


class Held(torch.nn.Module):
    """The constants of a graph: the same elements in other layouts."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        row = torch.arange(40, dtype=torch.float32).to("npu")
        self.held = draw.choice(
            (row[:WIDTH], row[1:9:2], row[3:5].repeat_interleave(2), row[7].expand(WIDTH), row[2:10].view(4, 2).t()[1])
        )
        self.square = draw.choice((row[:16].view(4, 4), row[:16].view(4, 4).t(), row[:32].view(4, 8)[:, 1::2]))
        self.nothing = torch.ones(0, WIDTH, device="npu")
        self.single = row[5]
        self.of_the_host = torch.tensor(3.0)
        self.conjugated = row[:2].to(torch.complex64).conj()


class Piece(NamedTuple):
    """A part of a program.

    Attributes:
        run: of the constants, two tensors of so many rows, and a number; its results.
        saved: whether a graph with it can be saved.
        eager: whether it can be saved where the option `force_eager` is set.
        at_one: whether it is certain to do the same with one row.
        rows: whether a graph with symbolic rows takes any number of them from two on.
        dynamo: whether Dynamo traces it into one graph that has the constants.
        writes: whether it writes an input.
        whole: whether AOT's graph is all of the function, without views of inputs and writes that AOT does outside.
    """

    run: Callable[[Held, torch.Tensor, torch.Tensor, int], tuple[Any, ...]]
    saved: bool = True
    eager: bool = False
    at_one: bool = False
    rows: bool = True
    dynamo: bool = True
    writes: bool = False
    whole: bool = True


_INFINITE, _NO_NUMBER = float("inf"), float("nan")
PIECES: Mapping[str, Piece] = MappingProxyType(
    {
        "plain": Piece(lambda m, x, y, n: (x + y, y * 2), at_one=True),
        "number": Piece(lambda m, x, y, n: (x * n, y + n // 2 - n % 3), at_one=True),
        "constant": Piece(lambda m, x, y, n: (x + m.held, m.held * 1), at_one=True),
        "constant twice": Piece(lambda m, x, y, n: (x * m.held - m.held, x @ m.square), at_one=True),
        "constant of no rows": Piece(lambda m, x, y, n: (torch.cat([m.nothing, x]), m.nothing + 1)),
        "constant number": Piece(lambda m, x, y, n: (x * m.single, y - m.of_the_host), at_one=True),
        "no finite number": Piece(lambda m, x, y, n: (x.clamp(max=_INFINITE), y.masked_fill(y > 0, _NO_NUMBER))),
        "dtypes": Piece(lambda m, x, y, n: (x.to(torch.float16), y.to(torch.int32) + 1), at_one=True),
        "new memory": Piece(
            lambda m, x, y, n: (torch.ones_like(x, memory_format=torch.contiguous_format), x.new_full((3,), 2.0))
        ),
        "rows of size": Piece(lambda m, x, y, n: (x.new_ones(x.shape[0] * 2 + 1, 2), x.new_zeros(x.shape[0] // 2 + 1))),
        "more sizes": Piece(lambda m, x, y, n: (x.new_ones((x.shape[0] - 1) ** 2 + 1), y.new_ones(x.shape[0] % 3 + 2))),
        "largest size": Piece(
            lambda m, x, y, n: (x.new_ones(torch.sym_max(x.shape[0], 3)), x * float(x.shape[0])), rows=False
        ),
        "split": Piece(lambda m, x, y, n: (x.split(2, 1)[1] + 1, *torch.sort(y, 1)), at_one=True),
        "indices": Piece(lambda m, x, y, n: (x[:, torch.tensor([2, 0], device=x.device)], y[..., None] + 1)),
        "turned": Piece(lambda m, x, y, n: (x.t().contiguous() + 1, y.reshape(-1, 2, 2).transpose(1, 2).reshape(-1))),
        "view returned": Piece(lambda m, x, y, n: ((x + 1)[:, :2].contiguous(), y.t()), whole=False),
        "input at one row": Piece(lambda m, x, y, n: (x[:, :2].contiguous(),)),
        "copy written": Piece(lambda m, x, y, n: (y.t().contiguous().add_(1), y * 2)),
        "squeezed": Piece(lambda m, x, y, n: ((x + 1).squeeze(0),)),
        "input written": Piece(lambda m, x, y, n: (x.add_(1), x * 2), writes=True, whole=False),
        "current device": Piece(lambda m, x, y, n: (torch.arange(3, device="npu"),)),
        "size of data": Piece(
            lambda m, x, y, n: (x.flatten()[(x > 0).flatten()],), saved=False, eager=True, dynamo=False
        ),
        "conjugated constant": Piece(lambda m, x, y, n: (m.conjugated.real + 0,), saved=False, dynamo=False),
    }
)
