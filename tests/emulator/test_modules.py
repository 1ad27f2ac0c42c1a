"""Every module of torch.nn gives the CPU's outputs and gradients: torch_npu replaces some of them by operators of its own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._pytree import tree_leaves, tree_map

from npugraph_ex.versions import packed_sequences

_SAMPLES = 3
PARTS = 4


def _with(device: str, value: Any) -> Any:
    """Copy tensors to a device; floating-point ones want a gradient."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().to(device).requires_grad_(leaf.is_floating_point())

    return tree_map(move, value)


def _outcome(module: torch.nn.Module, sample: Any, device: str) -> list[torch.Tensor | None]:
    """Return the outputs, then the gradients of the first input and of the parameters, on the host."""
    module = copy.deepcopy(module).to(device)
    args, kwargs = _with(device, sample.forward_input.args), _with(device, sample.forward_input.kwargs)
    outputs = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    losses = [output.float().sin().sum() for output in outputs if output.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    # Of several inputs torch_npu differentiates some losses by the first alone.
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
    wanted = [first, *module.parameters()] if first is not None else list(module.parameters())
    gradients = [None if tensor.grad is None else tensor.grad.cpu() for tensor in wanted]
    return [*(output.detach().cpu() for output in outputs), *gradients]


def _samples(info: ModuleInfo, *, training: bool) -> list[tuple[torch.nn.Module, Any]]:
    """Build modules without chance: dropout off, parameters there from the start."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=training)
    found = []
    for sample in itertools.islice(inputs, _SAMPLES):
        torch.manual_seed(0)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
        for part in module.modules():
            if isinstance(getattr(part, "p", None), float) and "ropout" in type(part).__name__:
                part.p = 0.0
            if isinstance(getattr(part, "dropout", None), float):
                part.dropout = 0.0
        if sample.forward_input is not None:
            found.append((module, sample))
    return found


INFOS = [info for info in module_db if not info.module_cls.__name__.startswith("Lazy")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_outputs_and_gradients_equal_the_cpus(part: int) -> None:
    """Forward and backward of each module's samples agree, in training and in evaluation."""
    wrong = []
    compared = 0
    for info, training in itertools.product(INFOS[part::PARTS], (True, False)):
        for module, sample in _samples(info, training=training):
            try:
                expected = _outcome(module, sample, "cpu")
            except (RuntimeError, ValueError, TypeError):
                continue  # the CPU does not do it either
            try:
                torch.testing.assert_close(
                    _outcome(module, sample, "npu"), expected, rtol=1e-4, atol=1e-4, equal_nan=True
                )
            except (AssertionError, RuntimeError, TypeError) as error:
                wrong.append(f"{info.module_cls.__name__}: {' '.join(str(error).split())[:200]}")
            compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared > len(INFOS) // PARTS


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            torch.nn.LSTM,
            marks=pytest.mark.skipif(packed_sequences.DIFFERENCE.older, reason=packed_sequences.DIFFERENCE.what),
        ),
        torch.nn.GRU,
        torch.nn.RNN,
    ],
)
def test_recurrent_layers_are_captured(kind: type[torch.nn.Module]) -> None:
    """Two bidirectional layers, and a packed sequence, give the CPU's values; a graph of one reads new inputs."""
    torch.manual_seed(0)
    host = kind(3, 4, num_layers=2, bidirectional=True)
    device = copy.deepcopy(host).npu()
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 3]))
    torch.testing.assert_close(device(packed.to("npu"))[0].data.cpu(), host(packed)[0].data)
    gradients = []
    for padded, layer in ((torch.randn(2, 7, 3), host), (None, device)):
        padded = gradients[0][0].detach().npu() if padded is None else padded  # noqa: PLW2901 - the same values on the device
        padded.requires_grad_()
        packed = torch.nn.utils.rnn.pack_padded_sequence(padded, [5, 3], batch_first=True)
        assert packed.batch_sizes.tolist() == [2, 2, 2, 1, 1]  # on the host in both
        values, lengths = torch.nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)
        assert lengths.tolist() == [5, 3]
        (values * torch.arange(values.numel(), device=values.device).view_as(values)).sum().backward()
        gradients.append((padded, values.detach().cpu(), padded.grad.cpu()))
    for expected, given in zip(gradients[0][1:], gradients[1][1:], strict=True):
        torch.testing.assert_close(given, expected)
    given = torch.randn(5, 2, 3)
    x = given.npu()
    graph = torch.npu.NPUGraph()
    with torch.no_grad(), torch.npu.graph(graph):
        y = device(x)[0]
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(y.cpu(), host(given * 2)[0].detach())
