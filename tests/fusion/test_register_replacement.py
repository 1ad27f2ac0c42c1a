"""Registration: the specification's example, what examples may be, duplicates, removal, who sees a new rule."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103, PLW0108

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from fx_helpers import aot_graph, evaluate, optimise, targets
from matchers import half
from registrations import model, register_as_in_the_specification, replace_fn, search_fn
from torch._subclasses.fake_tensor import FakeTensorMode

import npugraph_ex
from npugraph_ex.fusion import registry
from npugraph_ex.fusion.registry import register_replacement

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("size", "fusions"), [(7168, 1), (4096, 0)])
def test_the_specifications_example(size: int, fusions: int, dynamic: bool) -> None:
    """It fuses at last dimension 7168 and not at 4096, with values equal to the bit both times."""
    register_as_in_the_specification()
    rows = half(3, size), half(3, size)
    for row in rows if dynamic else ():
        torch._dynamo.mark_dynamic(row, 0)
    gm = aot_graph(model, *rows, half(size), dynamic=None if dynamic else False)
    inputs = [torch.randn(3, size).half(), torch.randn(3, size).half(), torch.rand(size).half()]
    values = [3 if not isinstance(n.meta["val"], torch.Tensor) else inputs.pop(0) for n in _placeholders(gm)]
    before = evaluate(gm, *values)
    report = optimise(gm)
    assert report.fusions() == fusions
    assert targets(gm) == (["npu_add_rms_norm", "mul"] if fusions else ["add", "npu_rms_norm", "mul"])
    for old, new in zip(before, evaluate(gm, *values), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    assert all("extra_check returned False" in miss.reason for miss in report.near_misses())


COMPOSITE: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda a, b: (a @ b).relu(),
    "matmul with a batch": lambda a, b: (a.unsqueeze(0) @ b).relu(),
    "linear": lambda a, b: torch.nn.functional.linear(a, b).relu(),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b).relu(),
    "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(
        a[None, None], b[None, None], b[None, None]
    ),
    "softmax": lambda a, b: torch.nn.functional.softmax(a, -1) + b,
}


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("search", COMPOSITE.values(), ids=list(COMPOSITE))
def test_examples_may_be_on_the_cpu(search: Callable[[Any, Any], Any], device: str) -> None:
    """A trace on the CPU has other operators than the model's graph, which is on the NPU."""
    register_replacement(
        search,
        lambda a, b: search(a, b).clamp(min=0),
        example_inputs=[torch.empty(8, 8, dtype=torch.float16, device=device) for _ in range(2)],
    )
    assert optimise(aot_graph(search, half(8, 8), half(8, 8))).fusions() == 1


def _placeholders(gm: Any) -> list[Any]:
    return list(gm.graph.find_nodes(op="placeholder"))


def test_user_rules_feed_default_rules() -> None:
    """What a user's rule makes, a default rule may fuse further."""

    def quantised(a: Any, b: Any, g: Any) -> Any:
        return torch_npu.npu_dynamic_quant(torch_npu.npu_rms_norm(a + b, g)[0])

    register_as_in_the_specification()
    gm = aot_graph(quantised, half(3, 7168), half(3, 7168), half(7168))
    assert optimise(gm).fusions() == 2
    assert targets(gm) == ["npu_add_rms_norm_dynamic_quant"]


def test_registering_twice_is_registering_once() -> None:
    """A second model registers the same functions anew; the rule goes when both registrations are removed."""
    first, second = register_as_in_the_specification(), register_as_in_the_specification()
    assert len(registry.USER_RULES.snapshot()) == 1
    first.remove()
    first.remove()
    assert len(registry.USER_RULES.snapshot()) == 1
    second.remove()
    assert registry.USER_RULES.snapshot() == ()


def test_registration_can_be_scoped() -> None:
    """``with register_replacement(...)`` holds inside the block only."""
    with register_as_in_the_specification():
        assert optimise(aot_graph(model, half(3, 7168), half(3, 7168), half(7168))).fusions() == 1
    assert optimise(aot_graph(model, half(3, 7168), half(3, 7168), half(7168))).fusions() == 0


@pytest.mark.parametrize("kind", ["fake list", "real tuple", "same object twice"])
def test_example_inputs_may_be_anything_with_metadata(kind: str) -> None:
    """Fake or real, tuple or list; one tensor given twice does not demand one tensor twice."""
    with FakeTensorMode():
        fakes = [torch.empty(1, 2, device="npu", dtype=torch.half) for _ in range(2)]
        gamma = torch.empty(2, device="npu", dtype=torch.half)
    examples: Any = {
        "fake list": [*fakes, gamma],
        "real tuple": (half(1, 2), half(1, 2), half(2)),
        "same object twice": [fakes[0], fakes[0], gamma],
    }[kind]
    register_replacement(search_fn, replace_fn, examples)
    assert optimise(aot_graph(model, half(3, 16), half(3, 16), half(16))).fusions() == 1


def test_a_running_compile_does_not_see_new_rules() -> None:
    """The registry hands out snapshots."""
    before = registry.USER_RULES.snapshot()
    register_as_in_the_specification()
    assert before == ()


@pytest.mark.parametrize("skip", [False, True])
def test_duplicates_are_one_rule_with_and_without_skip_duplicates(skip: bool) -> None:
    """Torch's function raises without it, which broke a second model (vllm-ascend#6513); ours counts."""
    handles = [register_replacement(relu, clamped, [half(2)], skip_duplicates=skip) for _ in range(2)]
    assert len(registry.USER_RULES.snapshot()) == 1
    gm = aot_graph(lambda x: torch.relu(x), half(4))
    assert optimise(gm).fusions(handles[0].name) == 1
    assert repr(handles[0]) == f"Registration(name={handles[0].name!r})"
    handles[0].remove()
    assert len(registry.USER_RULES.snapshot()) == 1
    handles[1].remove()
    assert registry.USER_RULES.snapshot() == ()


def test_checks_made_in_a_loop_are_several_rules() -> None:
    """They have one code and differ in the defaults of their arguments alone."""
    handles = []
    for size in (4, 8):

        def fits(match: Any, size: int = size) -> bool:
            return bool(match.kwargs["x"].meta["val"].shape[-1] == size)

        handles.append(register_replacement(relu, clamped, [half(2)], extra_check=fits))
    for size, fusions in ((4, 1), (8, 1), (2, 0)):
        assert optimise(aot_graph(lambda x: torch.relu(x), half(size))).fusions(handles[0].name) == fusions
    for handle in handles:
        handle.remove()


def relu(x: Any) -> Any:
    return torch.relu(x)


def clamped(x: Any) -> Any:
    return torch.clamp_min(x, 0)


def _product_of_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.reshape(-1) * y.reshape(-1)).sigmoid().view(x.shape)


@pytest.mark.parametrize("options", [{"require_capture": True}, {"force_eager": True}], ids=str)
@pytest.mark.usefixtures("own_registry")
def test_a_view_that_a_rule_makes_is_no_view_where_it_is_returned(options: dict[str, object]) -> None:
    """As in eager mode: `detach_` takes the result, whether it is replayed or not."""
    examples = [torch.empty(4, 8, device="npu") for _ in range(2)]
    register_replacement(lambda x, y: torch.sigmoid(torch.mul(x, y)), _product_of_rows, examples)
    compiled = torch.compile(lambda x, y: torch.sigmoid((x + 1) * y), backend="npugraph_ex", options=options)
    x, y = (torch.randn(4, 8, device="npu") for _ in range(2))
    with torch.no_grad():
        for _ in range(2):
            fused = compiled(x, y)
            report = npugraph_ex.last_report()
            assert report is not None
            assert report.fusions() == 1
            torch.testing.assert_close(fused.detach_(), torch.sigmoid((x + 1) * y))
            assert not fused._is_view()


def test_other_threads_call_compiled_functions_while_a_rule_is_registered() -> None:
    """What is traced at the registration is no `fx.symbolic_trace` for them."""
    doubled = torch.compile(lambda x: x * 2, backend="npugraph_ex")
    x, found = torch.ones(4, device="npu"), []
    doubled(x)

    def search(y: torch.Tensor) -> torch.Tensor:
        caller = threading.Thread(target=lambda: found.append(doubled(x).tolist()))
        caller.start()
        caller.join()
        return y.relu().neg()

    register_replacement(search, lambda y: -y.relu(), [torch.empty(4, device="npu")])
    assert found
    assert all(values == [2.0] * 4 for values in found)


def test_no_other_thread_compiles_while_a_rule_is_traced() -> None:
    """What torch notes of a compilation belongs to the process: the rule was left out, or calls were errors from then on."""
    reached, found = threading.Event(), []

    def backend(gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        reached.set()
        return gm.forward

    other = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1)))

    def search(y: torch.Tensor) -> torch.Tensor:
        other.start()
        found.append(reached.wait(0.5))
        return y.relu().neg()

    register_replacement(search, lambda y: -y.relu(), [torch.empty(4, device="npu")])
    other.join()
    assert found == [False]
    assert reached.is_set()
