"""How SGLang's NPU graph runner compiles, captures and replays a decoding step, in its order, and what must come of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch_npu
from torch import nn

from npugraph_ex.report.graphs import graph_records, graphs_so_far

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LONGEST, HIDDEN = 2, 8, 16


class _Step(nn.Module):
    """A decoding step: a norm, attention to a cache with lengths on the host, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        normed, _ = torch_npu.npu_rms_norm(x, self.scale)
        attended, _ = torch_npu.npu_fused_infer_attention_score(
            normed.view(BATCH, 1, HIDDEN), key, value, num_heads=2, scale=0.5, input_layout="BSH",
            actual_seq_lengths_kv=lengths,
        )  # fmt: skip
        return self.out(attended.view(BATCH, HIDDEN)) + x


def _backend(mode: str | None) -> Callable[..., Any]:
    """What SGLang's `get_compiler_backend(mode)` asks of `torchair`, import by import."""
    import torchair
    import torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce
    from torchair.configs.compiler_config import CompilerConfig

    config = CompilerConfig()
    config.mode = "max-autotune"
    if mode == "npugraph_ex":
        config.mode = "reduce-overhead"
        config.debug.run_eagerly = True
    backend: Callable[..., Any] = torchair.get_npu_backend(compiler_config=config)
    return backend


@pytest.mark.usefixtures("as_torchair")
def test_functions_that_are_not_compiled_have_a_backend() -> None:
    """SGLang's modules make a backend without its mode while they are imported, for functions that it compiles on GPUs alone."""
    function = torch.compile(lambda x: x + 1, dynamic=True, backend=_backend(None), disable=True)
    assert torch.equal(function(torch.ones(2).npu()).cpu(), torch.full((2,), 2.0))


@pytest.mark.usefixtures("as_torchair")
def test_a_decoding_step_is_compiled_captured_and_updated() -> None:
    """The runner captures the compiled step itself, and another thread gives each replay its lengths: values as in eager mode."""
    torch.manual_seed(0)
    model = _Step().npu()
    x, key, value = (torch.randn(*shape).npu() for shape in ((BATCH, HIDDEN), *[(BATCH, LONGEST, HIDDEN)] * 2))
    torch.compiler.reset()
    before = graphs_so_far()
    step = torch.compile(torch.no_grad()(model.forward), fullgraph=True, dynamic=False, backend=_backend("npugraph_ex"))
    lengths = [1] * BATCH
    for _ in range(2):
        torch.npu.synchronize()
        step(x, key, value, lengths)
    graph, stream, replayed = torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.Event()
    with (
        torch.compiler.set_stance(skip_guard_eval_unsafe=True),
        torch.npu.graph(graph, pool=torch.npu.graph_pool_handle(), stream=stream, auto_dispatch_capture=True),
    ):
        out = step(x, key, value, lengths)
    records = graph_records(after=before)
    assert [record.fate for record in records] == ["force_eager"]  # the engine's capture is the only one
    for given in ([3, 8], [7, 2], [8, 8]):
        x.copy_(torch.randn(BATCH, HIDDEN))
        replayed.synchronize()
        update = threading.Thread(target=graph.update, kwargs={"cpu_update_input": [{"actual_seq_lengths_kv": given}]})
        update.start()
        graph.replay()
        update.join()
        replayed.record()
        torch.npu.synchronize()
        with torch.no_grad():
            assert torch.equal(out.cpu(), model(x, key, value, given).cpu()), given
