"""Custom operators that mutate their arguments: values, aliases and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_helpers import random
from reinplacing import operators

aten = torch.ops.aten


@pytest.fixture(scope="module")
def update() -> Any:
    """A custom operator with two mutated arguments and a result."""

    @torch.library.custom_op("npugraph_ex_tests::update", mutates_args=("a", "c"))
    def operator(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        c.mul_(2)
        return a + c

    operator.register_fake(lambda a, _b, _c: torch.empty_like(a))
    return torch.ops.npugraph_ex_tests.update


PLAIN = {"inplace_pass": False, "input_inplace_pass": False, "remove_noop_ops": False}


@pytest.mark.parametrize("options", [{}, PLAIN], ids=["passes on", "passes off"])
@pytest.mark.parametrize("version", [1, 2])
def test_custom_operators_that_mutate(update: Any, version: int, options: dict[str, bool]) -> None:
    """Either wrapper of AOT around an operator with several mutated arguments is unwrapped, and needless copies go."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        first = update(x, b, scratch)
        second = update(x[1:], b[1:], scratch[1:])
        return first, second, scratch

    wrappers = []

    def note(gm: torch.fx.GraphModule, _inputs: object, _config: object) -> None:
        wrappers.extend(str(node.target) for node in gm.graph.nodes if "auto_functionalized" in str(node.target))

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3), post_grad_custom_pre_pass=note, **options)
    assert set(wrappers) == {"auto_functionalized" if version == 1 else "auto_functionalized_v2"}
    assert found.count("npugraph_ex_tests.update.default") == 2
    assert not any("auto_functionalized" in name for name in found)
    # The first version writes views back through their base, which takes a copy of it.
    assert options or version == 1 or "aten.clone.default" not in found


@pytest.mark.parametrize("version", [1, 2])
def test_a_mutating_custom_operator_costs_no_copy(update: Any, version: int) -> None:
    """On whole tensors no copy is left, whichever wrapper AOT takes."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        return update(x, b, scratch), scratch

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3))
    launched = [name for name in found if name != "aten.as_strided.default"]  # a view
    assert launched == ["aten.add.Tensor", "npugraph_ex_tests.update.default"]
