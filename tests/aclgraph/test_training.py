"""What a captured forward graph hands its backward: tensors that later calls leave alone, and random masks that agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, compiled, random
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from npugraph_ex.errors import CaptureError
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.versions import generator_states

SAVING: dict[str, Callable[[torch.Tensor], Any]] = {
    "intermediates": lambda x: (x * 2).exp().sin(),
    "its result": lambda x: x.exp(),
    "views of its result": lambda x: (x.exp() * 3, x.exp().view(-1)[2:]),
    "an input": lambda x: x.sin(),
    "views of an input": lambda x: x[2:] * x[:-2],
}


def _gradients(function: Callable[..., Any], inputs: list[torch.Tensor], order: list[int]) -> list[torch.Tensor]:
    """Call with every input, then go back from the results in ``order``; return the gradients of the inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    results = [function(leaf) for leaf in leaves]
    weights = [torch.utils._pytree.tree_map(torch.ones_like, result) for result in results]
    for number in order:
        flat = torch.utils._pytree.tree_leaves(results[number])
        torch.autograd.backward(flat, torch.utils._pytree.tree_leaves(weights[number]))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    "how", [{}, {"poison_results": True}, {"clone_input": False}], ids=["lent", "poisoned", "adopted"]
)
@pytest.mark.parametrize("function", SAVING.values(), ids=SAVING)
def test_gradients_with_results_and_inputs_given_up(function: Callable[..., Any], how: dict[str, bool]) -> None:
    """`clone_output=False` gives up results of earlier calls, and `clone_input=False` inputs: not what a backward needs."""
    inputs = [random(5) for _ in range(5)]
    graph = compiled(function, clone_output=False, **how)
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2]):
        for have, want in zip(_gradients(graph, inputs, order), _gradients(function, inputs, order), strict=True):
            torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", SAVING.values(), ids=SAVING)
def test_a_retained_graph_goes_back_again(function: Callable[..., Any], dynamic: bool | None) -> None:
    """Three backwards of a call add its gradient three times, also after the backward of a later call."""
    torch.compiler.reset()
    graph, gradients = torch.compile(function, backend="npugraph_ex", dynamic=dynamic), []
    for call in (function, graph, graph):
        leaf = torch.linspace(0.5, 1, 5, device=NPU).requires_grad_()
        results = torch.utils._pytree.tree_leaves(call(leaf))
        later = torch.utils._pytree.tree_leaves(call(torch.linspace(2, 3, 5, device=NPU).requires_grad_()))
        torch.autograd.backward([result.sum() for result in later])
        for retained in (True, True, False):
            torch.autograd.backward([result.sum() for result in results], retain_graph=retained)
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_results_are_given_up_where_no_backward_needs_them() -> None:
    """The same function under `no_grad`, and one that saves its input only, still lend one memory to every call."""
    for function, wants_gradient in ((SAVING["intermediates"], False), (SAVING["an input"], True)):
        graph = compiled(function, clone_output=False)
        with torch.set_grad_enabled(wants_gradient):
            first, second = (graph(random(5).requires_grad_(wants_gradient)) for _ in range(2))
        assert first.data_ptr() == second.data_ptr()


def _dropping_twice(x: torch.Tensor) -> torch.Tensor:
    """A layer that checkpointing runs again in the backward: it draws two masks, and its gradient is not its result."""
    return checkpoint(lambda y: F.dropout(F.dropout(y.sin(), 0.5) + y, 0.25).exp(), x, use_reentrant=False)


def _steps(function: Callable[..., Any], order: str) -> list[torch.Tensor]:
    """Results and gradients of some calls from one seed, where each letter of ``order`` is the call whose turn it is."""
    torch.manual_seed(9)
    torch.npu.manual_seed(9)
    leaves: dict[str, torch.Tensor] = {}
    results: dict[str, torch.Tensor] = {}
    for letter in order:
        if letter in results:
            results[letter].sum().backward()
        else:
            leaves[letter] = torch.linspace(-1, 1, 500, device=NPU).requires_grad_()
            results[letter] = function(leaves[letter])
    return [tensor.detach() for call in results for tensor in (results[call], leaves[call].grad)]


needs_generator_states = pytest.mark.skipif(not generator_states.draws_again(), reason=generator_states.DIFFERENCE.what)


@pytest.mark.slow
@needs_generator_states
@pytest.mark.parametrize("order", ["aabbccdd", "abcddbca"], ids=["in turn", "interleaved"])
def test_checkpointed_dropout_is_eagers(order: str) -> None:
    """The generator that AOT gives both halves is obeyed: each call draws anew, and results and gradients are aot_eager's."""
    have = _steps(compiled(_dropping_twice), order)
    torch.compiler.reset()
    want = _steps(torch.compile(_dropping_twice, backend="aot_eager", fullgraph=True), order)
    for got, expected in zip(have, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not any(torch.equal(first, second) for first, second in pairwise(have[::2]))


@needs_generator_states
def test_the_backward_of_checkpointed_dropout_has_the_forwards_mask() -> None:
    """Eager mode's law for one mask: the gradient is zero where the result is, in every call."""
    graph = compiled(lambda x: checkpoint(lambda y: F.dropout(y.sin(), 0.5), x, use_reentrant=False))
    masks = []
    for _ in range(4):
        x = torch.ones(1000, device=NPU, requires_grad=True)
        result = graph(x)
        result.sum().backward()
        masks.append((result != 0).cpu())
        assert torch.equal(masks[-1], (x.grad != 0).cpu())
    assert not any(torch.equal(first, second) for first, second in pairwise(masks))


@pytest.mark.slow
@needs_generator_states
def test_explain_says_what_keeps_checkpointed_dropout_uncaptured() -> None:
    """The reason names the generator; `require_capture` refuses such a graph."""
    watch = Watch()
    _steps(compiled(_dropping_twice), "aa")
    (entry,) = watch.explanation().graphs
    assert entry.graph.fate == "not capturable"
    reason = "tensor on device 'cpu'" if generator_states.DIFFERENCE.older else "fwd_rng_state_0: a random generator"
    assert reason in " ".join(entry.graph.obstacles)
    with pytest.raises(BackendCompilerFailed, match=reason) as caught:
        _steps(compiled(_dropping_twice, require_capture=True), "aa")
    assert isinstance(caught.value.inner_exception, CaptureError)
