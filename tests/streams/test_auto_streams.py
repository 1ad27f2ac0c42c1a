"""The option `auto_streams`: which work goes to a side stream, what it wins on the modelled clock, and that values stay."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_programs import check, compiled

import npu_emulator
from npugraph_ex import explain, last_report, ops, scope
from npugraph_ex.passes import auto_streams
from npugraph_ex.report.passes import Branch

pytestmark = pytest.mark.usefixtures("fresh")

Program = Callable[..., Any]


@pytest.fixture
def free_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events cost nothing, so that small programs have branches that pay."""
    monkeypatch.setattr(auto_streams, "EVENTS_US", 0.0)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers on the device, all of them exact in products and sums."""
    count = torch.Size(sizes).numel()
    return (torch.arange(count).reshape(sizes) % 3 - 1).to("npu", dtype)


def branches(function: Program, *inputs: torch.Tensor, **options: Any) -> tuple[Branch, ...]:
    """What goes to the side stream; values are right on every schedule, and nothing races."""
    check(compiled(function, auto_streams=True, stream_check="raise", **options), function, inputs, inputs)
    report = last_report()
    assert report is not None
    return report.branches


def modelled(function: Program, *inputs: torch.Tensor, **options: Any) -> float:
    """The modelled microseconds of one replay."""
    fast = compiled(function, **options)
    fast(*inputs)
    torch.npu.synchronize()
    with npu_emulator.timeline() as clock:
        fast(*inputs)
    return clock.end


def mixture(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, shared: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Routed experts, each weighted by the gate, and a shared expert."""
    weights = (x @ gate).relu()
    out = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        out = out + (x @ up[expert]).relu() @ down[expert] * weights[:, expert, None]
    return out + (x @ shared).relu() @ last


def two_chains(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two branches of seven kernels, 2 us each."""
    for _ in range(7):
        x, y = x * 2, y + 1
    return x - y


@pytest.mark.slow
def test_shared_expert_beside_the_routed_ones() -> None:
    """With one routed expert, as long as the shared one, the two run side by side, and the clock agrees with the report."""
    inputs = [
        numbers(*sizes) for sizes in ((4, 512), (512, 1), (1, 512, 2048), (1, 2048, 512), (512, 2048), (2048, 512))
    ]
    (branch,) = branches(mixture, *inputs)
    assert (len(branch.nodes), branch.join) == (3, "add_1")
    file, _, line = branch.source.rpartition(":")
    assert "out + (x @ shared)" in linecache.getline(file, int(line))
    won = modelled(mixture, *inputs) - modelled(mixture, *inputs, auto_streams=True)
    assert won == pytest.approx(branch.saves_us + auto_streams.EVENTS_US, abs=0.02)  # events are free on the clock


def latent_attention() -> tuple[Program, list[torch.Tensor]]:
    """A layer of DeepSeek-V3, of one eighth in most sizes, and its inputs."""
    transformers = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=2048, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=768, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, attn_implementation="eager",
    )  # fmt: skip
    layer = transformers.DeepseekV3Attention(config, 0).half().eval().npu()
    x = torch.randn(1, 4, 2048).half()
    turned = transformers.DeepseekV3RotaryEmbedding(config)(x, torch.arange(4)[None])
    return lambda x, cos, sin: layer(x, (cos, sin), None)[0], [value.npu() for value in (x, *turned)]


def experts() -> tuple[Program, list[torch.Tensor]]:
    """Four routed experts and a shared one, and their inputs."""
    sizes = ((4, 512), (512, 4), (4, 512, 2048), (4, 2048, 512), (512, 2048), (2048, 512))
    return mixture, [numbers(*size) for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("experts", experts), ("latent attention", latent_attention)])
def test_the_page_has_the_times_of_models(name: str, model: Callable[[], tuple[Program, list[torch.Tensor]]]) -> None:
    """Modelled times and pools are those of the page; results are eager mode's on an adverse schedule, without a race."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "streams.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("|") and name in line)
    promised = [float(number) for number in re.findall(r"([\d.]+) (?:us|MiB)", row)]
    function, inputs = model()
    expected, found = function(*inputs), list[float]()
    for divided in (False, True):
        fast = compiled(function, auto_streams=divided, stream_check="raise")
        with npu_emulator.schedule("lazy"), npu_emulator.detect_races() as races:
            assert torch.equal(fast(*inputs), expected)
        pool = npu_emulator.resources().captured[-1].pool_bytes
        with npu_emulator.timeline() as clock:
            fast(*inputs)
        assert races == []
        found += [clock.end, pool / 2**20]
    assert found == pytest.approx(promised, rel=0.05 if model is experts else 0.15)  # a model as the release spells it


def test_it_says_what_went_to_the_side_stream() -> None:
    """The explanation has a row for the branch, with its source line, gain and memory."""
    x, y = numbers(64), numbers(64)
    found = explain(two_chains, x, y, options={"auto_streams": True})
    assert "on a side stream" in str(found)
    assert re.search(
        r"7 kernels from add: 6\.00 us won, modelled \(.*test_auto_streams\.py:\d+\)", str(found.summary())
    )


def test_too_little_stays() -> None:
    """A branch that takes little more than the events stays on the main stream."""

    def four(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x, y = x * 2, y + 1
        return x - y

    assert branches(four, numbers(8), numbers(8)) == ()
    assert len(branches(two_chains, numbers(8), numbers(8))) == 1


def _with_streams(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with scope.npu_stream_switch("mine"):
        z = x * 2
    return two_chains(x, y), z


def _with_event(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ops.npu_tagged_event_record(EVENT)
    return two_chains(x, y)


EVENT = ops.npu_create_tagged_event("of-the-user")


@pytest.mark.parametrize("function", [_with_streams, _with_event])
def test_a_graph_with_streams_of_its_own_stays(function: Program) -> None:
    """Who wrote a stream or an event has divided the work."""
    assert branches(function, numbers(8), numbers(8)) == ()


def _limited(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with scope.limit_core_num(4, 8):
        return two_chains(x, y)


def _asks_the_host(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.nonzero().sum() + y.nonzero().sum()


def _on_the_host(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(8)
    even, odd = numbers * 2, numbers * 2 + 1
    return x + (even - odd * even).to(x.device) + y


@pytest.mark.usefixtures("free_events")
@pytest.mark.parametrize("function", [_limited, _asks_the_host, _on_the_host])
def test_what_cannot_run_beside_others_stays(function: Program) -> None:
    """Work with cores of its own, work whose size the host must learn, and the host's own work."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        assert branches(function, numbers(8), numbers(8)) == ()
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False


@pytest.mark.usefixtures("free_events")
def test_draws_stay_in_their_order() -> None:
    """Random numbers are drawn on the main stream, outside every window."""

    def noisy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2 + torch.rand_like(x)) - (y + 1) * torch.rand_like(y)

    fast = compiled(noisy, auto_streams=True, stream_check="raise")
    fast(numbers(8), numbers(8))
    report = last_report()
    assert report is not None
    assert not any("rand" in node for branch in report.branches for node in branch.nodes)


@pytest.mark.usefixtures("free_events")
def test_writes_wait_for_the_side_stream() -> None:
    """An input is written after the side stream has read it, in the graph's end and by an operator in place."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z, w = (x * 2 + 1) * 3, (x - y) * 5
        total = z.neg() + w
        x.add_(total)
        return total + x

    assert len(branches(function, numbers(8), numbers(8))) == 1


@pytest.mark.usefixtures("free_events")
def test_what_a_functional_write_only_reads_is_no_race() -> None:
    """The program writes a part in place beside a reader of the whole; the graph writes new memory, on the side stream too."""

    def program(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x.add_(2)
        before = x + 1
        x[:, 0:4:2].index_put_((rows,), values.clone())
        x[:, 0:4:2].neg_()
        x[:, :3].zero_()
        return before

    def arguments() -> list[torch.Tensor]:
        return [
            torch.arange(16, dtype=torch.int32).view(4, 4).npu(),
            torch.ones(1, dtype=torch.long).npu(),
            torch.full((1, 2), 9, dtype=torch.int32).npu(),
        ]

    own, theirs = arguments(), arguments()
    expected = program(*theirs)
    for order in ("lazy", "random:1"):
        torch.compiler.reset()
        fast = torch.compile(program, backend="npugraph_ex", options={"auto_streams": True, "stream_check": "raise"})
        own = arguments()
        with npu_emulator.schedule(order):
            found = fast(*own)
        assert torch.equal(found.cpu(), expected.cpu())
        assert torch.equal(own[0].cpu(), theirs[0].cpu())
    assert last_report().branches


@pytest.mark.usefixtures("free_events")
def test_views_and_parts_belong_to_nobody() -> None:
    """Two branches that view one value are two, although the view stands in the window; parts of one result are one."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        base = x * 2
        view = base.reshape(2, -1)[0]
        return (view + 1) * 2 - (view - y).neg()

    (branch,) = branches(function, numbers(8), numbers(4))
    assert len(branch.nodes) == 2
    assert branches(lambda x: sum(part * 2 for part in torch.sort(x * 3)[0].split(4)), numbers(8))


@pytest.mark.usefixtures("free_events")
def test_sizes_that_are_symbols() -> None:
    """Symbols count as the sizes that were compiled for; another size gives its own values."""
    torch.compiler.reset()
    fast = compiled(two_chains, dynamic=True, auto_streams=True, stream_check="raise")
    check(fast, two_chains, (numbers(8), numbers(8)), (numbers(6), numbers(6)))
    report = last_report()
    assert report is not None
    assert [len(branch.nodes) for branch in report.branches] == [7]


@pytest.mark.usefixtures("free_events")
def test_operator_by_operator() -> None:
    """Without a capture the side stream has the same work and the same order."""
    assert len(branches(two_chains, numbers(8), numbers(8), force_eager=True)) == 1
