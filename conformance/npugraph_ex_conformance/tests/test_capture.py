"""Passes, capture and replay on int32 programs with views, aliases and in-place writes, where nothing may differ."""

from __future__ import annotations

import gc
from functools import partial

import pytest

import npu_emulator
from npugraph_ex import testing
from npugraph_ex.versions.device_memory import device_memory
from npugraph_ex_conformance.examples.caller_scripts import script_of_call, smallest_call
from npugraph_ex_conformance.examples.callers import caller_example
from npugraph_ex_conformance.examples.idioms import idiom_example
from npugraph_ex_conformance.examples.nested_regions import nested_region_example
from npugraph_ex_conformance.examples.saved_graphs import saved_graph_example
from npugraph_ex_conformance.examples.shared_pools import shared_pool_example
from npugraph_ex_conformance.examples.static_kernels import static_kernel_example
from npugraph_ex_conformance.session import Run

WHAT = "(integers)"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_integers(run: Run, dynamic: bool) -> None:
    """Replay with new values at new addresses gives eager mode's integers, aliases and writes; old results stay."""
    maker = testing.exact_programs(dynamic=dynamic)
    run.explore(f"integers {dynamic}", maker, examples=run.profile.integers, what=WHAT)


def test_integers_through_torch_compile(run: Run) -> None:
    """The same through Dynamo and AOT, which handle aliased and written inputs in their own ways."""
    run.explore(
        "compiled integers", testing.exact_programs(), examples=2 * run.profile.compiled, route="compile", what=WHAT
    )


def test_callers(run: Run) -> None:
    """Whatever a caller passes, keeps, writes and drops, results and what it kept are as in eager mode."""
    for number in range(run.profile.callers):
        example = run.seed * 1_000_003 + number
        try:
            with run.entered("(callers)", source=f"caller_example({example})", kind="caller"):
                assert caller_example(example) == ""
        except AssertionError:
            found = smallest_call(example)
            if found is not None:
                run.end_with(f"callers {example}", *found, partial(script_of_call, example))
            raise


def test_idioms(run: Run) -> None:
    """Pads, draws that nobody uses, checkpoints, gradients and tangents: what no graph shows is as in eager mode."""
    run.check_examples(idiom_example, run.profile.callers // 3, what="(idioms)", kind="idiom")


def test_nested_regions(run: Run) -> None:
    """Whatever nested compile regions hold, write and return, in whatever way they are called: values are eager mode's."""
    run.check_examples(nested_region_example, run.profile.callers // 3, what="(nested regions)", kind="nested regions")


def test_static_kernels(run: Run) -> None:
    """Whatever CANN's compiler does, values are eager mode's; it gets what runs, once, and leaves nothing installed."""
    if not npu_emulator.is_active():
        pytest.skip("the stand-in for the compiler is for the emulated device")
    run.check_examples(
        static_kernel_example, run.profile.shared_pool // 2, what="(static kernels)", kind="static kernels"
    )


def test_saved_graphs(run: Run) -> None:
    """A graph that was saved and loaded computes what its function does, and refuses what it was not compiled for."""
    run.check_examples(saved_graph_example, run.profile.callers // 3, what="(saved graphs)", kind="saved graph")


def test_graphs_of_one_pool(run: Run) -> None:
    """Graphs of several functions and sizes in one pool: no replay overwrites what another one handed out."""
    run.check_examples(shared_pool_example, run.profile.shared_pool, what="(shared pool)", kind="shared pool")


def test_memory_is_given_back(run: Run) -> None:
    """What was compiled and is gone holds no byte, no graph and no event, and its pools' memory can be returned."""
    names = [f"memory {run.seed}:{example}" for example in range(run.profile.shared_pool + 1)]
    for name in names:
        _use(name)  # sets up what is kept for good, such as as many events as the largest of them needs
    before = _in_use(run)
    for name in names:
        with run.entered("(memory)", source=name, kind="memory given back"):
            assert _use(name) == []
    assert _in_use(run) == before


def _use(name: str) -> list[str]:
    return testing.check(testing.Case.of(testing.sample(testing.exact_programs(), name))).failures


def _in_use(run: Run) -> tuple[int, ...]:
    gc.collect()
    device_memory().empty_cache()
    memory = (device_memory().memory_allocated(), device_memory().memory_reserved())
    if run.target.kind != "emulated":
        return memory
    import npu_emulator

    device = npu_emulator.resources()
    return (*memory, sum(graph.alive for graph in device.graphs), device.events_used)
