"""`interpolate` stays one kernel with eager mode's bits and strides, for sizes that are numbers or symbols, trained or not."""

from __future__ import annotations

import pytest
import torch
from device_helpers import NPU, check, compiled, describe
from torch.nn import functional

import npu_emulator

MODES = {
    "nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,),
}  # fmt: skip
KINDS = [(mode, dims) for mode, several in MODES.items() for dims in several]
WANTED = ({"scale_factor": 2.0}, {"size": 7}, {"scale_factor": 0.6})


def _inputs(dims: int, size: int) -> torch.Tensor:
    return torch.randn(2, 3, *[size] * dims, device=NPU)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize(("mode", "dims"), KINDS)
def test_one_kernel_with_the_same_bits(mode: str, dims: int, *, dynamic: bool) -> None:
    """By a factor, to a size, and smaller; a replay of each launches what eager mode does."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [functional.interpolate(x, mode=mode, **given) for given in WANTED]

    graph = check(program, [(_inputs(dims, size),) for size in (4, 6, 4)], dynamic=dynamic)
    x = _inputs(dims, 4)
    with npu_emulator.kernel_log() as log, torch.no_grad():
        graph(x)
        torch.npu.synchronize()
    assert len([ran for ran in log if "upsample" in ran.name]) == len(WANTED)
    assert len([*log]) <= len(WANTED) + 1  # and a copy of the input


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@torch.enable_grad()  # type: ignore[untyped-decorator]
def test_gradients(mode: str, *, dynamic: bool) -> None:
    """Of known sizes they are eager mode's to the bit; of symbols torch's parts give the same numbers but for roundings."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x * 2, scale_factor=2.0, mode=mode)

    graph = compiled(program, dynamic=dynamic)
    for size in (4, 6):
        mine = _inputs(2, size).requires_grad_()
        own = mine.detach().clone().requires_grad_()
        found, expected = graph(mine), program(own)
        assert describe(found) == describe(expected)
        weights = torch.randn_like(expected)
        found.backward(weights)
        expected.backward(weights)
        assert mine.grad is not None
        assert own.grad is not None
        allowed = {"rtol": 1e-5, "atol": 1e-5} if dynamic else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found, expected, **allowed)
        torch.testing.assert_close(mine.grad, own.grad, **allowed)


@pytest.mark.slow
def test_other_backends_trace_as_before() -> None:
    """The repair ends with the compilation."""
    upsample = torch.ops.aten.upsample_bilinear2d
    before = dict(upsample.vec.py_kernels), dict(upsample.default.py_kernels)
    compiled(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"))(_inputs(2, 4))
    assert (dict(upsample.vec.py_kernels), dict(upsample.default.py_kernels)) == before
