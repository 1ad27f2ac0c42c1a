"""Numbers that decide a branch and enter no graph: what was kept for one of them is not used for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU
from torch._dynamo.backends.common import aot_autograd

import npugraph_ex
from npugraph_ex.inference import cache_compile
from npugraph_ex.report.graphs import graphs_so_far

Branch = Callable[[torch.Tensor, Any], torch.Tensor]


def _asserted(x: torch.Tensor, n: int) -> torch.Tensor:
    assert n
    return x + 1


def _whole_batch(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * 2 if n == x.shape[0] else x - 2


BRANCHES: dict[str, tuple[Branch, tuple[Any, ...]]] = {
    "truth": (lambda x, n: x + 1 if n else x - 1, (False, 3, 0, True, 5)),
    "asserted": (_asserted, (3, 4, 1)),
    "parity": (lambda x, n: x + 1 if n % 2 else x - 1, (3, 4, 5, 8)),
    "equality": (lambda x, n: x + 1 if n == 3 else x - 1, (4, 3, 5)),
    "two numbers": (lambda x, n: x + 1 if n[0] < n[1] else x - 1, ((3, 5), (5, 3), (7, 7), (2, 9))),
    "a size": (_whole_batch, (4, 5, 6)),
    "bound": (lambda x, n: x + 1 if n > 4 else x - 1, (5, 4, 9)),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["dynamic unset", "dynamic"])
@pytest.mark.parametrize("name", BRANCHES)
def test_the_branch_is_that_of_each_call(name: str, dynamic: bool | None, tmp_path: Path) -> None:
    """In the process that compiles, and in one that finds what was kept and meets the numbers in another order."""
    branch, numbers = BRANCHES[name]
    x = torch.arange(4.0)
    for order in (numbers, numbers[::-1]):
        torch.compiler.reset()
        kept = cache_compile(branch, dynamic=dynamic, cache_dir=tmp_path)
        for number in order:
            assert torch.equal(kept(x.to(NPU), number).cpu(), branch(x, number)), f"{number} in {order}"


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    """The second process compiles nothing for a number of the same branch."""
    branch, _ = BRANCHES["parity"]
    made = []
    for number in (3, 5):
        torch.compiler.reset()
        before = graphs_so_far()
        cache_compile(branch, dynamic=True, cache_dir=tmp_path)(torch.ones(4).to(NPU), number)
        made.append(graphs_so_far() - before)
    assert made == [1, 0]


def test_without_torchs_guards_it_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A caller who drops them, as vLLM does, could not know for which numbers the graph is right."""
    found: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(npugraph_ex.compile_fx(gm, inputs))
        return found[-1].boxed()

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(BRANCHES["parity"][0], backend=aot_autograd(fw_compiler=keep), dynamic=True)(
            torch.ones(4).to(NPU), 3
        )
    (graph,) = found
    with caplog.at_level("INFO"):
        assert graph.get_code() is None
    assert "decided a branch" in caplog.text
