"""Wrong arguments are refused in torch's words, with an error of its class; the device's own refusals name the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

Ones = Callable[..., torch.Tensor]
"""Makes a tensor of ones, of these sizes, on the device that is asked."""


def _at(x: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=x.device)


CALLS: dict[str, Callable[[Ones], Any]] = {
    "cat of numbers": lambda ones: torch.cat([ones(), ones()]),
    "cat of a number last": lambda ones: torch.cat([ones(2), ones()]),
    "cat of numbers with out": lambda ones: torch.cat([ones(), ones()], out=ones(2)),
    "cat of nothing": lambda _: torch.cat([]),
    "cat of sizes": lambda ones: torch.cat([ones(2, 3), ones(2, 4)]),
    "cat of dimensions": lambda ones: torch.cat([ones(2, 3), ones(2)]),
    "cat in a dimension": lambda ones: torch.cat([ones(2, 3), ones(2, 3)], 5),
    "stack of sizes": lambda ones: torch.stack([ones(2), ones(3)]),
    "stack in a dimension": lambda ones: torch.stack([ones(2), ones(2)], 4),
    "hstack": lambda ones: torch.hstack([ones(2, 3), ones(3, 3)]),
    "vstack": lambda ones: torch.vstack([ones(2, 3), ones(2, 4)]),
    "split by nothing": lambda ones: ones(4).split(0),
    "split by sizes": lambda ones: ones(4).split([1, 2]),
    "split of a number": lambda ones: ones().split(1),
    "chunk": lambda ones: ones(4).chunk(0),
    "chunk of a number": lambda ones: ones().chunk(2),
    "unbind of a number": lambda ones: ones().unbind(),
    "unbind in a dimension": lambda ones: ones(2).unbind(3),
    "index_select in a dimension": lambda ones: (x := ones(3)).index_select(2, _at(x, 0)),
    "index_select by floats": lambda ones: ones(3).index_select(0, ones(2)),
    "index_select outside": lambda ones: (x := ones(3)).index_select(0, _at(x, 5)),
    "index_select by a matrix": lambda ones: (x := ones(3)).index_select(0, _at(x, 0, 1).view(1, 2)),
    "index_fill in a dimension": lambda ones: (x := ones(3)).index_fill(2, _at(x, 0), 1.0),
    "index_add in a dimension": lambda ones: (x := ones(3)).index_add(2, _at(x, 0), ones(1)),
    "gather in a dimension": lambda ones: (x := ones(3)).gather(2, _at(x, 0)),
    "gather by floats": lambda ones: ones(3).gather(0, ones(2)),
    "gather of dimensions": lambda ones: (x := ones(3, 3)).gather(0, _at(x, 0, 1)),
    "gather outside": lambda ones: (x := ones(3)).gather(0, _at(x, 7)),
    "scatter outside": lambda ones: (x := ones(3)).scatter(0, _at(x, 9), 1.0),
    "scatter of dtypes": lambda ones: (x := ones(3)).scatter(0, _at(x, 0), ones(1).half()),
    "narrow": lambda ones: ones(3).narrow(0, 2, 5),
    "narrow to less than nothing": lambda ones: ones(3).narrow(0, 0, -1),
    "flip in a dimension": lambda ones: ones(3).flip(2),
    "flip twice": lambda ones: ones(3, 3).flip(0, 0),
    "roll of two": lambda ones: ones(3).roll([1, 2], [0]),
    "roll in a dimension": lambda ones: ones(3).roll(1, 4),
    "roll by nothing": lambda ones: ones(3).roll([]),
    "permute": lambda ones: ones(2, 3).permute(0, 0),
    "view": lambda ones: ones(2, 3).view(4),
    "expand": lambda ones: ones(2, 3).expand(4, 3),
    "mm": lambda ones: ones(2, 3) @ ones(2, 3),
    "mm of dtypes": lambda ones: ones(2, 3) @ ones(3, 2).half(),
    "bmm": lambda ones: torch.bmm(ones(2, 3, 4), ones(3, 4, 5)),
    "linear": lambda ones: functional.linear(ones(2, 3), ones(4, 5)),
    "add of sizes": lambda ones: ones(2) + ones(3),
    "add of whole numbers by a fraction": lambda ones: torch.add(ones(2).int(), ones(2).int(), alpha=1.5),
    "add in place of dtypes": lambda ones: ones(2).int().add_(ones(2)),
    "clamp": lambda ones: ones(2).clamp(),
    "where by floats": lambda ones: torch.where(ones(2), ones(2), ones(2)),
    "masked_fill by floats": lambda ones: ones(2).masked_fill(ones(2), 1.0),
    "sum in a dimension": lambda ones: ones(2).sum(3),
    "sum twice": lambda ones: ones(2, 2).sum((0, 0)),
    "mean of whole numbers": lambda ones: ones(2).int().mean(),
    "max of nothing": lambda ones: ones(0).max(),
    "topk": lambda ones: ones(3).topk(5),
    "embedding in a vector": lambda ones: functional.embedding(_at(x := ones(3), 0), x),
    "layer_norm": lambda ones: functional.layer_norm(ones(2, 3), (4,)),
    "batch_norm": lambda ones: functional.batch_norm(ones(2, 3), ones(4), ones(4)),
    "conv1d": lambda ones: functional.conv1d(ones(1, 1, 4), ones(1, 1, 2), stride=0),
    "max_pool2d": lambda ones: functional.max_pool2d(ones(1, 1, 2, 2), 5),
    "grid_sample": lambda ones: functional.grid_sample(ones(1, 1, 2, 2), ones(1, 2, 2, 3), align_corners=False),
    "cross_entropy": lambda ones: functional.cross_entropy(x := ones(2, 3), _at(x, 0, 1, 2)),
    "pad": lambda ones: functional.pad(ones(2), (-3, 0)),
}


def _refusal(call: Callable[[Ones], Any], device: str) -> Exception:
    try:
        call(lambda *sizes: torch.ones(sizes, device=device))
        torch.npu.synchronize()
    except Exception as error:  # noqa: BLE001 - its class is what is compared
        return error
    pytest.fail(f"nothing is refused on {device}")


def _words(error: Exception) -> str:
    """Without the code that an NPU's error has."""
    return str(error).partition("\n")[0].replace("npu:0", "cpu")


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_as_torch_refuses_it(name: str) -> None:
    """By the class that a program may catch, and by the words."""
    expected, found = (_refusal(CALLS[name], device) for device in ("cpu", "npu"))
    assert isinstance(found, type(expected))
    assert _words(found) == _words(expected)


def test_in_a_capture() -> None:
    """Where no kernel can run on the host to say so."""
    x = torch.ones((), device="npu")
    with pytest.raises(RuntimeError, match="zero-dimensional tensor"), torch.npu.graph(torch.npu.NPUGraph()):
        torch.cat([x, x])
