"""Every option that this version honours changes something that can be seen; an option that did nothing would fail here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from stand_in_cann import StandInCann, end_of_process
from torch import fx

from npugraph_ex import ops, scope
from npugraph_ex.config import OPTION_TABLE
from npugraph_ex.config.compiler_config import CompilerConfig, apply_flat
from npugraph_ex.errors import CollectiveDeadlockWarning, GraphVerificationError, OptionValueError, StreamOrderWarning
from npugraph_ex.frontend.backend import get_npu_backend
from npugraph_ex.frontend.explain import Watch, explain
from npugraph_ex.observe.explain import GraphExplanation
from npugraph_ex.streams.findings import Code

_COVERED: dict[str, str] = {}


def shows(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which options a test is about."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        _COVERED.update(dict.fromkeys(names, test.__name__))
        return test

    return note


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function under this backend with these options."""
    config = CompilerConfig()
    apply_flat(config, options)
    torch._dynamo.reset()
    return torch.compile(function, backend=get_npu_backend(compiler_config=config), fullgraph=True, dynamic=False)


def told(function: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> GraphExplanation:
    """What became of the one graph of a function that was called with each of ``calls``; values are checked."""
    watch, fast, kept = Watch(), compiled(function, **options), []
    for call in calls:
        expected = function(*[value.clone() for value in call])
        kept.append((expected, fast(*call)))
    for expected, got in kept:
        # A fused operator rounds less often, so a quantised value may be the neighbour of the other.
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1 if function is _quantised else 0)
    (entry,) = watch.explanation().graphs
    return entry


def outcome(entry: GraphExplanation, name: str) -> str:
    """What a pass did to the graph."""
    return next(record.outcome for record in entry.graph.report.passes if record.name == name)


def ones(*sizes: int) -> torch.Tensor:
    """A tensor on the device."""
    return torch.ones(sizes or (8,), device="npu")


def fresh(count: int) -> list[tuple[torch.Tensor]]:
    """Inputs at different addresses."""
    return [(ones() * factor,) for factor in range(count)]


def chain(x: torch.Tensor) -> torch.Tensor:
    """Something to capture."""
    return (x + 1).relu() * 2


def bump(x: torch.Tensor) -> torch.Tensor:
    """Something that writes its input."""
    x.add_(1)
    return x * 2


def test_every_honoured_option_has_such_a_test() -> None:
    """The table is covered: an option is refused (only its default is honoured), or a test here shows its effect."""
    available = {name for name, row in OPTION_TABLE.items() if row.honoured is None or len(row.honoured) > 1}
    assert available == set(_COVERED)


@shows("mode")
def test_mode() -> None:
    """Both names of this backend capture; TorchAir's third is handed over or refused, not run as if it were one of them."""
    for mode in ("npugraph_ex", "reduce-overhead"):
        assert told(chain, *fresh(2), mode=mode).graph.fate == "captured"
    with pytest.raises(NotImplementedError, match="max-autotune"):
        compiled(chain, mode="max-autotune")


@shows("force_eager")
def test_force_eager() -> None:
    """Nothing is captured."""
    assert told(chain, *fresh(2)).captures
    entry = told(chain, *fresh(2), force_eager=True)
    assert (entry.graph.fate, entry.captures) == ("force_eager", ())


@shows("require_capture")
def test_require_capture() -> None:
    """A graph that cannot be captured runs all the same, or raises."""

    def function(x: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, host + 1

    entry = told(function, (ones(), torch.ones(3)))
    assert entry.graph.fate == "not capturable"
    with pytest.raises(Exception, match="require_capture is on"):
        compiled(function, require_capture=True)(ones(), torch.ones(3))


@shows("stable_inputs_in_place")
def test_stable_inputs_in_place() -> None:
    """An input that keeps its address gets a graph of its own that reads it there; off, there is only the first graph."""
    calls = fresh(1) * 10
    for stable in (True, False):
        captures = told(chain, *calls, stable_inputs_in_place=stable).captures
        assert any("at the same address" in capture.reason for capture in captures) == stable


def _segments(pool: tuple[int, int]) -> int:
    return sum(tuple(segment["segment_pool_id"]) == tuple(pool) for segment in torch.npu.memory_snapshot())


@shows("use_graph_pool")
def test_use_graph_pool() -> None:
    """The capture's memory is in the caller's pool."""
    pool = torch.npu.graph_pool_handle()
    fast = compiled(chain, use_graph_pool=pool)
    fast(ones())
    assert _segments(pool) > 0


@shows("reuse_graph_pool_in_same_fx")
def test_reuse_graph_pool_in_same_fx() -> None:
    """Two captures share one pool by default, and with False each has its own."""
    shared = told(bump, *fresh(2), reuse_graph_pool_in_same_fx=True)
    apart = told(bump, *fresh(2), reuse_graph_pool_in_same_fx=False)
    assert len(shared.captures) == len(apart.captures) == 2
    with pytest.raises(OptionValueError, match="Leave one of them out"):
        compiled(bump, reuse_graph_pool_in_same_fx=False, use_graph_pool=(0, 1))


def test_pools_apart_hold_more_memory() -> None:
    """Each pool of its own reserves memory of its own while both captures live."""
    held = {}
    for reuse in (True, False):
        watch, fast = Watch(), compiled(bump, reuse_graph_pool_in_same_fx=reuse)
        inputs = [ones(), ones()]
        for x in inputs:
            fast(x)
        (entry,) = watch.explanation().graphs
        held[reuse] = entry.pool_bytes or 0
    assert held[False] == 2 * held[True] > 0


@shows("capture_limit")
def test_capture_limit() -> None:
    """A limit of one makes two addresses in turn capture at every call; the default keeps both."""
    counts = {}
    for limit in (64, 1):
        a, b = ones(), ones()
        watch, fast = Watch(), compiled(bump, capture_limit=limit)
        for x in (a, b, a, b):
            fast(x)
        counts[limit] = len(watch.explanation().graphs[0].captures)
    assert counts == {64: 2, 1: 4}


@shows("clone_input")
def test_clone_input() -> None:
    """Without copies the first caller's tensor is the buffer, so the second call's values appear in it."""
    for clone, seen in ((True, 1.0), (False, 5.0)):
        first, fast = ones(), compiled(chain, clone_input=clone)
        fast(first)
        fast(ones() * 5)
        assert first[0].item() == seen


@shows("clone_output")
def test_clone_output() -> None:
    """True captures once however many results are held; False hands out memory that the next call overwrites."""
    held = {value: compiled(chain, clone_output=value) for value in (True, False)}
    copies = [held[True](ones() * factor) for factor in range(4)]
    assert [result[0].item() for result in copies] == [2.0, 4.0, 6.0, 8.0]
    assert len(told(chain, *fresh(4), clone_output=True).captures) == 1
    assert len(told(chain, *fresh(4)).captures) == 3
    lent = held[False](ones())
    held[False](ones() * 9)
    assert lent[0].item() == 20.0


@shows("poison_results")
def test_poison_results() -> None:
    """What clone_output=False gives up is spoilt at the next call instead of looking right by chance."""
    fast = compiled(chain, clone_output=False, poison_results=True)
    first = fast(ones())
    fast(ones())
    assert first.isnan().all().item()


@shows("frozen_parameter")
def test_frozen_parameter() -> None:
    """Addresses are not compared: a new address captures nothing, where it otherwise would."""
    assert len(told(bump, *fresh(3)).captures) == 3
    watch, fast = Watch(), compiled(bump, frozen_parameter=True)
    first = ones()
    fast(first)
    fast(ones())
    (entry,) = watch.explanation().graphs
    assert len(entry.captures) == 1
    assert first[0].item() == 3.0  # the graph still writes where it was told that the tensor would stay


@shows("remove_noop_ops")
def test_remove_noop_ops() -> None:
    """The copy of a value that nobody else uses is launched only when the pass is off."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).clone() * 2

    # Reinplacing would find the copy too.
    off = {"inplace_pass": False}
    kernels = {on: told(function, *fresh(2), remove_noop_ops=on, **off).graph.kernels_after for on in (True, False)}
    assert kernels == {True: 2, False: 3}


@shows("remove_cat_ops")
def test_remove_cat_ops() -> None:
    """The parts of a concatenation are written in place, or concatenated."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 1, x * 2])

    done = {on: outcome(told(function, *fresh(2), remove_cat_ops=on), "cat_removal") for on in (True, False)}
    assert done == {True: "changed", False: "skipped"}


@shows("inplace_pass")
def test_inplace_pass() -> None:
    """An intermediate result is computed in place, or not."""
    done = {on: outcome(told(chain, *fresh(2), inplace_pass=on), "reinplace_intermediates") for on in (True, False)}
    assert done == {True: "changed", False: "skipped"}


@shows("input_inplace_pass")
def test_input_inplace_pass() -> None:
    """A written input is written by the operator itself, or by a copy after it."""
    kernels = {on: told(bump, *fresh(2), input_inplace_pass=on).graph.kernels_after for on in (True, False)}
    assert kernels == {True: 2, False: 3}


def _quantised(x: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, _, total = torch_npu.npu_add_rms_norm(x, x, gamma)
    quantised, scale = torch_npu.npu_dynamic_quant(y)
    return quantised, scale, total


def _halves() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 32, device="npu", dtype=torch.float16), torch.ones(32, device="npu", dtype=torch.float16)


@shows("pattern_fusion_pass")
def test_pattern_fusion_pass() -> None:
    """Normalisation and quantisation are fused, or not."""
    fused = {on: told(_quantised, _halves(), pattern_fusion_pass=on).graph.report.fusions() for on in (True, False)}
    assert fused == {True: 1, False: 0}


@shows("fusion_rules")
def test_fusion_rules() -> None:
    """One rule is switched off by its name."""
    assert told(_quantised, _halves()).graph.report.fusions() == 1
    entry = told(_quantised, _halves(), fusion_rules={"add_rms_norm_dynamic_quant": False})
    assert entry.graph.report.fusions() == 0
    with pytest.raises(Exception, match=r"no rule has that name; did you mean 'add_rms_norm_quant'\?"):
        compiled(_quantised, fusion_rules={"add_rms_norm_quants": False})(*_halves())


@pytest.mark.parametrize("given", [[], ["force_eager"], [("force_eager", True)]])
def test_options_are_a_dict(given: object) -> None:
    """A list is refused, an empty one and one of pairs too, whichever way it comes."""
    if given:  # torch.compile itself drops what is empty
        with pytest.raises(Exception, match="options takes a dict"):
            torch.compile(chain, backend="npugraph_ex", options=given)(ones())
    with pytest.raises(ValueError, match="options takes a dict"):
        explain(chain, ones(), options=given)


def _wrong(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
    """A user's pass that keeps every shape and computes something else."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        node.target = torch.ops.aten.neg.default


@shows("check_numerics")
def test_check_numerics() -> None:
    """A pass that changes values is accepted without the check and refused with it."""
    compiled(chain, post_grad_custom_pre_pass=_wrong)(ones())
    with pytest.raises(Exception, match="other values") as caught:
        compiled(chain, post_grad_custom_pre_pass=_wrong, check_numerics=True)(ones())
    assert GraphVerificationError.__name__ in repr(caught.value) or isinstance(caught.value, GraphVerificationError)


@shows("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
def test_custom_passes() -> None:
    """The user's passes run, the one before fusion and the other after it, with the config as third argument."""
    seen: list[tuple[str, list[str], object]] = []

    def note(where: str) -> Callable[[fx.GraphModule, object, object], None]:
        def run(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
            calls = [node.target._schema.name for node in gm.graph.nodes if hasattr(node.target, "_schema")]
            seen.append((where, calls, config))

        return run

    told(_quantised, _halves(), post_grad_custom_pre_pass=note("pre"), post_grad_custom_post_pass=note("post"))
    (first, before, config), (second, after, _) = seen
    assert (first, second) == ("pre", "post")
    assert "npu::npu_dynamic_quant" in before
    assert "npu::npu_add_rms_norm_dynamic_quant" in after
    assert isinstance(config, CompilerConfig)


def _dumped(folder: Path, call: int = 0) -> dict[str, Any]:
    (directory,) = folder.glob(f"npugraph_ex_data/*/*/call__{call}")
    entries = json.loads((directory / "index.json").read_text())
    return {entry["operator"]: torch.load(directory / entry["file"], weights_only=True) for entry in entries}


@shows("dump_tensor_data", "data_dump_dir")
def test_dump_tensor_data(tmp_path: Path) -> None:
    """Every input and every operator's value lies in the folder, for each call, and the graph is not captured."""
    entry = told(chain, *fresh(3), dump_tensor_data=True, data_dump_dir=str(tmp_path), inplace_pass=False)
    assert (entry.graph.fate, entry.captures) == ("dumped", ())
    values = _dumped(tmp_path, 2)
    assert values["L['x']"][0].item() == 2.0
    assert values["aten.add.Tensor"][0].item() == 3.0
    assert values["aten.mul.Tensor"][0].item() == 6.0
    assert not list(tmp_path.rglob("*.part"))


def test_a_dump_shows_a_value_before_it_is_overwritten(tmp_path: Path) -> None:
    """The value of the first operator is its own, although the second writes into the same memory."""
    told(chain, (ones() * -3,), dump_tensor_data=True, data_dump_dir=str(tmp_path))
    values = _dumped(tmp_path)
    assert values["aten.add.Tensor"][0].item() == -2.0
    assert values["aten.relu_.default"][0].item() == 0.0


@shows("data_dump_stage")
def test_data_dump_stage(tmp_path: Path) -> None:
    """The graph that is run and dumped is the one after the passes, or the one that came from AOT."""
    for stage, operator in (("optimized", "aten.relu_.default"), ("original", "aten.relu.default")):
        told(chain, *fresh(1), dump_tensor_data=True, data_dump_dir=str(tmp_path / stage), data_dump_stage=stage)
        assert operator in _dumped(tmp_path / stage)


def test_a_dump_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the folder's place: the error names the option and what is wrong."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"data_dump_dir=.*cannot be written"):
        compiled(chain, dump_tensor_data=True, data_dump_dir=str(tmp_path / "file"))(ones())


@shows("capture_error_mode")
def test_capture_error_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode reaches the device's capture."""
    begin, modes = torch.npu.NPUGraph.capture_begin, []

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        modes.append(kwargs["capture_error_mode"])
        begin(self, *args, **kwargs)

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_begin", note)
    for mode in ("global", "thread_local", "relaxed"):
        told(chain, *fresh(1), capture_error_mode=mode)
    assert modes == ["global", "thread_local", "relaxed"]


@shows("force_recapture")
def test_force_recapture() -> None:
    """Each call captures anew, says so, and results of earlier calls stay as they were."""
    entry = told(chain, *fresh(4), force_recapture=True)
    assert [capture.reason for capture in entry.captures] == ["the first call"] + 3 * ["the option force_recapture"]


def test_force_recapture_does_not_count_against_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """A recapture of a known key is no new graph: nothing is dropped for it."""
    told(chain, *fresh(4), force_recapture=True, capture_limit=1)
    assert "capture_limit" not in caplog.text


@shows("static_kernel_compile", "disable_static_kernel_compile_cache", "static_kernel_time_limit")
def test_static_kernels(cann: StandInCann, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler is asked, what it makes is kept or not, and it is stopped after the seconds that the option gives."""
    told(chain, *fresh(2), static_kernel_compile=True, disable_static_kernel_compile_cache=True)
    assert len(cann.calls()) == len(cann.installed()) == 1
    assert list(tmp_path.rglob("packages")) == []
    end_of_process()
    told(chain, *fresh(2), static_kernel_compile=True)
    assert len(list(tmp_path.rglob("packages/*/*.run"))) == 1
    end_of_process()
    cann.does("hang")
    options = {"disable_static_kernel_compile_cache": True, "static_kernel_time_limit": 1}
    told(chain, *fresh(1), static_kernel_compile=True, **options)
    assert "op_compiler was stopped after 1 seconds" in caplog.text


@shows("stream_check")
def test_stream_check() -> None:
    """A race is reported and kept, refused, repaired or passed over, as the option says."""
    event = ops.npu_create_tagged_event("computed")

    def racy(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            y = x * 3
            ops.npu_tagged_event_record(event)
        return y + 1

    with pytest.warns(StreamOrderWarning, match=r"add `ops\.npu_tagged_event_wait\(event\)`"):
        warned = told(racy, *fresh(1))
    assert [finding.code for finding in warned.graph.report.streams.errors] == [Code.READ_AFTER_WRITE]
    with pytest.raises(Exception, match="StreamOrderError"):
        told(racy, *fresh(1), stream_check="raise")
    repaired = told(racy, *fresh(1), stream_check="repair").graph.report.streams
    assert [finding.repaired for finding in repaired.of(Code.READ_AFTER_WRITE)] == [True]
    assert not told(racy, *fresh(1), stream_check="off").graph.report.streams
    assert [finding.repaired for finding in explain(racy, ones(2), options={"stream_check": "repair"}).streams] == [
        True
    ]


@shows("deadlock_check")
def test_deadlock_check() -> None:
    """Two operators that meet other processes, at once on two streams: told beforehand if asked; the program runs on."""

    @torch.library.custom_op("option_test::meet", mutates_args=())
    def meet(x: torch.Tensor, group: str) -> torch.Tensor:
        del group
        return x * 2

    meet.register_fake(lambda x, group: torch.empty_like(x))  # noqa: ARG005 - the operator's arguments

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with scope.npu_stream_switch("side"):
            y = meet(x, "experts")
        return y, meet(x, "tensors")

    with pytest.warns(CollectiveDeadlockWarning, match="may run at once and need 96 vector cores; the device has 48"):
        asked = told(both, *fresh(3), deadlock_check=True)
    assert [finding.code for finding in asked.graph.report.streams] == [Code.COLLECTIVES_EXCEED_CORES]
    (finding,) = asked.graph.report.streams
    sources = [place.source for place in (finding.first, finding.second) if place is not None]
    assert [Path(source.rpartition(":")[0]).name for source in sources] == 2 * [Path(__file__).name]
    assert not told(both, *fresh(1)).graph.report.streams
