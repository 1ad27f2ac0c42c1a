"""Saved graphs that were traced for sizes of two and more, in the hands of a client that drops torch's guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npugraph_ex import CompilerConfig
from npugraph_ex.errors import SavedGraphError
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts, CompiledFxGraph
from npugraph_ex.saving.sizes import Condition, excludes_one
from tests.device_helpers import NPU


def _attention_like(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = torch.relu(x * 2).split([4, 4], -1)  # at one row, `contiguous` copies nothing
    return first.contiguous() + 1, second.reshape(-1, 2, 2).transpose(1, 2).reshape(x.shape[0], 4)


def _written_copy(x: torch.Tensor) -> torch.Tensor:
    copy = x[:, :4].clone(memory_format=torch.preserve_format)
    copy.add_(1)
    return copy + x[:, 4:]


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).squeeze(0)


def _writes_its_input_at_one(x: torch.Tensor) -> torch.Tensor:
    x.t().contiguous().add_(1)
    return x * 2


def _returns_its_input_at_one(x: torch.Tensor) -> torch.Tensor:
    return x[:, :4].contiguous()


def _refuses_one(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] > 1)
    return x + 1


def _compiled(function: Callable[..., Any], *, force_eager: bool) -> CompiledFxGraph:
    """Compile for a marked number of rows, as vLLM does."""
    config, made = CompilerConfig(), []
    config.debug.run_eagerly = force_eager
    x = torch.randn(4, 8, device=NPU)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=get_npu_backend(compiler_config=config, on_compiled=made.append))(x)
    return made[0]


@pytest.mark.parametrize("force_eager", [True, False], ids=["eager", "captured"])
@pytest.mark.parametrize("function", [_attention_like, _written_copy])
def test_a_batch_of_one_in_the_next_process(function: Callable[..., Any], force_eager: bool) -> None:
    """It is computed as eager mode does, from the code that was saved for two rows and more."""
    code = _compiled(function, force_eager=force_eager).get_code()
    loaded = CompiledFxGraph.load_artifacts(CompiledFxArtifacts(py_code=code))
    for rows in (4, 1, 3, 1):
        x = torch.randn(rows, 8, device=NPU)
        have, want = loaded(rows, x.clone()), function(x.clone())
        for one, other in zip(have, want if isinstance(want, tuple) else (want,), strict=True):
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=0)
    with pytest.raises(SavedGraphError, match="by itself"):  # else vLLM saves a model without it
        loaded.serialize()
    with pytest.raises(SavedGraphError, match=r"1 <= .* is 0"):
        loaded(0, torch.randn(0, 8, device=NPU))


@pytest.mark.parametrize("function", [_squeezed, _writes_its_input_at_one, _returns_its_input_at_one, _refuses_one])
def test_what_does_something_else_at_one_is_saved_for_guarded_callers_only(function: Callable[..., Any]) -> None:
    """Another shape, memory that is shared otherwise, an error: every process of such a client compiles anew."""
    made = _compiled(function, force_eager=True)
    assert made.get_code() is None
    assert "a size of one" in made.unsaved
    assert _compiled(function, force_eager=True).get_code(guarded=True)


def test_a_condition_is_arithmetic() -> None:
    """What torch writes of sizes is, `max` and roundings included; a call of anything else is refused before it runs."""
    inputs = [torch.ones(4, 6)]
    assert Condition("max(1, L['t0'].size()[1] // 2) == 3 and math.floor(L['t0'].size()[0] / 3) == 1").holds(inputs)
    assert not Condition("min(L['t0'].size()[0], 3 if L['t0'].size()[1] == 6 else 4) == 4").holds(inputs)
    for text in ("open('x')", "math.sqrt(4) == 2", "torch.load('x')", "L['t0'].__class__", "max.__self__"):
        with pytest.raises(ValueError, match="is no condition on sizes"):
            Condition(text)


def test_only_lower_bounds_are_lowered() -> None:
    """Other conditions on the same sizes stay."""
    text = "2 <= L['t0'].size()[0] <= 64 and L['t0'].size()[0] % 3 == 1 and 4 <= L['t1']"
    for rows, second, of_two, of_one in (
        (4, 4, True, True),
        (1, 4, False, True),
        (3, 4, False, False),
        (1, 2, False, False),
    ):
        inputs = [torch.ones(rows), second]
        assert (Condition(text).holds(inputs), Condition(text, from_one=True).holds(inputs)) == (of_two, of_one)
    assert [excludes_one(one) for one in (text, "3 <= L['t0']", "")] == [True, False, False]
