"""Products of 8-bit floats with scales, against each element's own scale in float64; only Ascend950 has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from conftest import Program

_ELEMENTWISE = """
import torch

float8, power = torch.float8_e4m3fn, torch.float8_e8m0fnu
m, k, n = 130, 288, 144
torch.manual_seed(0)

SHAPES = {"tensor": lambda rows: (1,), "row": lambda rows: (rows,), "column": lambda rows: (rows, 1),
          "1x128": lambda rows: (rows, 3), "128x128": lambda rows: (2, 3), "1x32": lambda rows: (rows, 5, 2)}
PLACES = {"tensor": lambda i, j: (i * 0,), "row": lambda i, j: (i,), "column": lambda i, j: (i, i * 0),
          "1x128": lambda i, j: (i, j // 128), "128x128": lambda i, j: (i // 128, j // 128),
          "1x32": lambda i, j: (i, j // 64, j // 32 % 2)}

def scale(kind, rows):
    drawn = torch.rand(SHAPES[kind](rows)) + 0.1
    return torch.exp2(torch.randint(-4, 5, drawn.shape)).to(power) if kind == "1x32" else drawn

def exact(factor, of_factor, kind):
    i, j = torch.meshgrid(torch.arange(factor.shape[0]), torch.arange(factor.shape[1]), indexing="ij")
    return factor.double() * of_factor.float().double()[PLACES[kind](i, j)]

def transposed(tensor):
    return tensor.transpose(0, 1) if tensor.dim() > 1 else tensor

def same(found, wanted, name):
    found = found.cpu()
    near = {"rtol": torch.finfo(found.dtype).eps, "atol": 1e-5 * wanted.abs().max().item()}
    torch.testing.assert_close(found.double(), wanted, **near, msg=lambda text: f"{name}: {text}")
    if found.dtype != torch.float32:  # rounded once: nearly always as the exact value is
        assert (found == wanted.to(found.dtype)).float().mean() > 0.98, name
    print(name)

a, w = torch.randn(m, k).to(float8), torch.randn(n, k).to(float8)
kinds = [("tensor", "tensor"), ("row", "row"), ("column", "column"), ("tensor", "row"), ("1x128", "1x128"), ("1x128", "128x128"),
         ("128x128", "128x128"), ("1x32", "1x32")]
for number, (of_a, of_b) in enumerate(kinds):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    left, right = (a, w.to(torch.float8_e5m2)) if number == 3 else (a, w)
    bias = None if dtype == torch.float32 else torch.randn(n).to(dtype)
    scale_a, scale_b = scale(of_a, m), scale(of_b, n)
    wanted = exact(left, scale_a, of_a) @ exact(right, scale_b, of_b).T + (0 if bias is None else bias.double())
    given = [t.npu() for t in (left, scale_a)], right.npu(), scale_b.npu(), None if bias is None else bias.npu()
    (x, of_x), y, of_y, shift = given
    same(torch._scaled_mm(x, y.t(), of_x, transposed(of_y), shift, None, dtype), wanted, f"{of_a} {of_b}")
    same(torch._scaled_mm_v2(x, y.t(), [of_x], [0], [], [transposed(of_y)], [0], [], shift, dtype, [1, 0]), wanted, "v2")
    if of_b != "column":
        y, of_y = y.t().contiguous(), transposed(of_y).contiguous()
        same(torch._scaled_mm(x, y, of_x, of_y, shift, out_dtype=dtype), wanted, "in rows")

for groups, ends in ((3, [40, 40, 100]), (1, [130])):
    for kind in ("row", "1x32"):
        weights = torch.randn(groups, n, k).to(float8)
        scale_a, scales = scale(kind, m), [scale(kind, n) for _ in range(groups)]
        stacked = torch.stack([transposed(each) for each in scales])
        scale_b = stacked[0] if groups == 1 and kind == "1x32" else stacked
        def wanted(a):
            left, out = exact(a, scale_a, kind), torch.zeros(m, n, dtype=torch.float64)
            for start, end, weight, each in zip([0, *ends], ends, weights, scales):
                out[start:end] = left[start:end] @ exact(weight, each, kind).T
            return out
        x, y, of_x, of_y, offs = (t.npu() for t in (a, weights.mT, scale_a, scale_b, torch.tensor(ends, dtype=torch.int32)))
        same(torch._scaled_grouped_mm(x, y, of_x, of_y, offs), wanted(a), f"{groups} groups {kind}")
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            found = torch._scaled_grouped_mm_v2(x, y, [of_x], [1], [], [of_y], [1], [], offs, out_dtype=torch.bfloat16)
        other = torch.randn(m, k).to(float8)
        x.copy_(other)
        graph.replay()
        same(found, wanted(other), "replayed")

def refused(name, call):
    try:
        torch.npu.synchronize(call())
    except RuntimeError as error:
        print(name, "refused" if name in str(error) else error)

x, y = a.npu(), w.npu().t()
one, rows, columns = torch.ones(1).npu(), torch.ones(m, 3).npu(), torch.ones(3, n).npu()
refused("scale_b fits neither", lambda: torch._scaled_mm(x, y, rows, rows.t(), out_dtype=torch.bfloat16))
refused("mat_b and scale_b must both", lambda: torch._scaled_mm(x, y, rows, columns, out_dtype=torch.bfloat16))
refused("out_dtype must be", lambda: torch._scaled_mm(x, y, one, one))
refused("one dtype", lambda: torch._scaled_mm(x, y, one, one.to(power), out_dtype=torch.bfloat16))
stack, factors = w.npu().t()[None], (torch.ones(m).npu(), torch.ones(1, n).npu())
for name, ends in (("with an entry of offs for each group", [50, 130]), ("ends of groups", [131])):
    offs = torch.tensor(ends, dtype=torch.int32).npu()
    refused(name, lambda: torch._scaled_grouped_mm(x, stack, *factors, offs).cpu())
"""


@pytest.mark.slow
def test_each_element_has_its_own_scale(program: Program) -> None:
    """All forms of scales, both versions, both layouts, groups (one empty), capture; and what only this device refuses."""
    done = program(_ELEMENTWISE, "--quiet", "--soc", "Ascend950PR_9579")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in lines if line.endswith("refused")] == [
        f"{name} refused"
        for name in (
            "scale_b fits neither",
            "mat_b and scale_b must both",
            "out_dtype must be",
            "one dtype",
            "with an entry of offs for each group",
            "ends of groups",
        )
    ]
    assert len(lines) == 8 + 8 + 7 + 8 + 6


def test_other_chips_refuse_them() -> None:
    """On the default chip the call fails and names the one that has it."""
    factor, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="npu"), torch.ones(1, device="npu")
    with pytest.raises(RuntimeError, match="only on Ascend950"):
        torch._scaled_mm(factor, factor, scale, scale, out_dtype=torch.bfloat16)
