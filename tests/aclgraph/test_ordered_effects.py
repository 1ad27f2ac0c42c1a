"""Operators that AOT keeps in order by tokens, which come before the inputs: the program's own operator and inputs are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled, describe
from torch._dynamo.exc import BackendCompilerFailed

from npugraph_ex import _torch_private
from npugraph_ex.frontend.entry.explain import Watch

linalg = torch.linalg
UNCHECKED = {
    "inv": lambda x, y: linalg.inv(x) + y,
    "solve": lambda x, y: linalg.solve(x, y),  # noqa: PLW0108 - its line is compared
    "lu_factor": lambda x, y: linalg.lu_factor(x)[0] + y,
    "ldl_factor": lambda x, y: linalg.ldl_factor(x)[0] + y,
}
"""Functions of torch.linalg that the host checks, each with one that leaves that to the program."""


def _matrices() -> list[torch.Tensor]:
    return [torch.eye(3, device=NPU) * 2, torch.rand(3, 3, device=NPU)]


@pytest.mark.parametrize("name", UNCHECKED)
def test_a_checked_decomposition_is_refused_by_its_own_name(name: str) -> None:
    """Not by the first argument's: that is on the NPU. The function which is advised is captured, and gives the same values.

    torch_npu computes the other functions on the CPU, so that none can be advised.
    """

    def program(batch: torch.Tensor, weight: torch.Tensor) -> Any:
        return UNCHECKED[name](batch, weight)

    with pytest.raises(BackendCompilerFailed, match="cannot be captured") as refused:
        compiled(program, require_capture=True)(*_matrices())
    on_the_device = name in {"inv", "solve"}
    (line,) = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert line.startswith(
        f"  torch.linalg.{name}: the host has to read from the device whether it failed (aten._linalg_check_errors)"
        + (f"; torch.linalg.{name}_ex does not ask the host (" if on_the_device else " (")
    )
    assert line.endswith(f"{Path(__file__).name}:{UNCHECKED[name].__code__.co_firstlineno})")

    if not on_the_device:
        return

    def advised(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        second = (weight,) if name == "solve" else ()
        return getattr(linalg, f"{name}_ex")(batch, *second)[0] + 0

    given = _matrices()
    torch.testing.assert_close(compiled(advised, require_capture=True)(*given), advised(*given), rtol=0, atol=0)


@pytest.fixture
def noted() -> Iterator[list[str]]:
    """What an operator of the program noted, which says itself that it has effects."""
    notes: list[str] = []
    with torch.library._scoped_library("ordered_effects", "FRAGMENT") as library:
        library.define("note(Tensor x) -> Tensor")
        library.impl("note", lambda x: (notes.append("noted"), x.clone())[1], "CompositeExplicitAutograd")
        library.impl("note", lambda x: x.new_empty(x.shape), "Meta")
        library._register_effectful_op("ordered_effects::note", torch._library.effects.EffectType.ORDERED)
        yield notes


def test_an_operator_of_the_program_runs_at_each_call(noted: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """It is named, with the reason."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ordered_effects.note(x) * 2

    graph, x = compiled(program), torch.ones(3, device=NPU)
    for _ in range(3):
        assert graph(x).tolist() == [2, 2, 2]
    assert len(noted) == 3
    assert "ordered_effects.note.default: torch runs it for its effects, at each call" in caplog.text
    with pytest.raises(BackendCompilerFailed, match=r"note\.default: torch runs it"):
        compiled(program, require_capture=True)(x)


class Layer(torch.nn.Module):
    """A weight and a bias that AOT knows to stay where they are, behind the token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor, other: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Solve for what the layer gives, and write the last argument."""
        total.add_(1)
        return torch.linalg.solve(batch, self.linear(other))


@pytest.mark.parametrize("grad", [False, True])
def test_explain_lists_the_inputs_of_the_program(grad: bool) -> None:
    """Each once, under its own name, with what is a weight and what is written; no token."""
    model = Layer().to(NPU)
    watch = Watch()
    with torch.set_grad_enabled(grad):
        compiled(model)(*_matrices(), torch.zeros(2, device=NPU))
    inputs = watch.explanation().graphs[0].graph.inputs
    assert {(entry.name, entry.value, entry.weight_bytes) for entry in inputs} == {
        ("L['batch']", "float32[3, 3] npu:0", 0),
        ("L['other']", "float32[3, 3] npu:0", 0),
        ("L['total']", "float32[2] npu:0", 0),
        ("L['self'].linear.weight", "float32[3, 3] npu:0", 36),
        ("L['self'].linear.bias", "float32[3] npu:0", 12),
    }
    assert len(inputs) == 5
    assert [entry.name for entry in inputs if entry.mutated] == ["L['total']"]


@pytest.mark.parametrize("options", [{}, {"check_numerics": True}])
def test_views_and_writes_behind_a_token(options: dict[str, Any]) -> None:
    """A result that is a view of a written input is a view of that one, where the input begins elsewhere in its storage, too."""

    def program(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inverse = torch.linalg.inv(other)
        x.add_(1)
        return x[1:], x.view(-1, 3).t(), x[1:].view(torch.int16), inverse

    def inputs(start: int) -> list[torch.Tensor]:
        storage = torch.arange(100, dtype=torch.float32, device=NPU)
        return [storage.as_strided((3, 8), (8, 1), start), _matrices()[0]]

    graph = compiled(program, **options)
    for start in (6, 6, 2, 10):
        mine, eagers = inputs(start), inputs(start)
        got, expected = [*graph(*mine), *mine], [*program(*eagers), *eagers]
        for one, other in zip(got, expected, strict=True):
            assert (describe(one), one.storage_offset()) == (describe(other), other.storage_offset())
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert got[0].untyped_storage().data_ptr() == mine[0].untyped_storage().data_ptr()


def test_the_input_of_a_view_is_found_behind_a_token() -> None:
    """By its position in the graph, where AOT counts the function's inputs alone."""
    homes: list[tuple[int, ...]] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        found = _torch_private.outputs_in_inputs(gm.graph)
        homes.extend(tuple(inputs[home].meta["val"].shape) for home in found.values())
        return gm.forward

    def program(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        return x[1:], torch.linalg.inv(other), x.t()

    torch.compiler.reset()
    torch.compile(program, backend=_torch_private.aot_backend(fw_compiler=look))(
        torch.ones(2, 5, device=NPU), _matrices()[0]
    )
    assert homes == [(2, 5), (2, 5)]
