"""Campaigns: every item has one answer, whatever dies; an item that ends its process is an answer; kinds find faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from npugraph_ex.commands.campaign import _plan
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.errors import UsageError
from npugraph_ex.testing import mutant
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex_conformance.campaign import architecture_checks, strangers, strangers_tables, summary, warm
from npugraph_ex_conformance.campaign.architecture_checks import ArchitectureCase, check_architecture
from npugraph_ex_conformance.campaign.driver import cluster
from npugraph_ex_conformance.campaign.kinds import KINDS
from npugraph_ex_conformance.campaign.ledger import Ledger, Row
from npugraph_ex_conformance.campaign.warm import WarmProcess
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer
from npugraph_ex_conformance.models.architectures import ARCHITECTURES

HERE = Path(__file__).parent
MARKED, FATAL, CUMULATIVE = (f"campaign_kinds:{name}" for name in ("MARKED", "FATAL", "CUMULATIVE"))


@pytest.fixture(autouse=True)
def _own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes find the kinds of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmProcess]:
    """A process that may take 0.5 GiB; one that waits is noticed after a second. Its parent blocks SIGINT, as Ray's workers do."""
    monkeypatch.setattr(warm, "_LOOKS_IDLE", 4)
    found = WarmProcess(CampaignSettings(target="", memory=0.5))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    yield found
    found.close()
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.slow
def test_an_item_that_ends_its_process_is_an_answer(process: WarmProcess) -> None:
    """A crash, a wait for ever, an endless loop, too much memory: each has its name, and what comes after runs.

    An item that presses Ctrl-C itself gets it.
    """
    rows = [process.run(FATAL, number) for number in range(8)]
    assert [row.state for row in rows] == [
        "passed", "crashed", "hung", "too long", "too much memory", "failed", "skipped", "passed"
    ]  # fmt: skip
    assert "SIGABRT" in rows[1].message
    assert rows[5].message == "raised ZeroDivisionError: five"


@pytest.mark.slow
def test_what_items_leave_behind_together_is_told_apart(process: WarmProcess) -> None:
    """Memory that grows from item to item is reported with the number of items; alone, the item is right."""
    rows = [process.run(CUMULATIVE, number) for number in range(4)]
    assert [row.state for row in rows] == ["passed", "passed", "passed", "too much memory"]
    assert "had run 3 items before; alone the item passed" in rows[3].message


@pytest.mark.skipif(
    "NPUGRAPH_EX_CLUSTER" not in os.environ,
    reason="Ray gives up nodes whose machine is busy; `tox -e campaigns` runs this test alone",
)
def test_every_item_has_one_answer_when_nodes_and_the_driver_die(tmp_path: Path) -> None:
    """Two nodes die while they work, the driver dies in the middle of a line; the campaign that goes on runs only the rest."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from npugraph_ex_conformance.campaign.driver import Driver, cluster

    def added(left: int = 3) -> object:
        try:
            return nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
        except SystemExit:  # Ray gives a node some seconds to start, which a busy machine may not have
            if left == 1:
                raise
            return added(left - 1)

    marks, settings = tmp_path / "marks", CampaignSettings(target="", checkout=str(tmp_path / "marks"))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    workers = [added(), added()]
    ledger = Ledger(tmp_path / "results.jsonl", {MARKED: 200}, {"seed": 0})
    ledger.open(resume=False)

    def kill_a_node() -> None:
        nodes.remove_node(workers.pop(0), allow_graceful=False)

    def first_run(_rows: list[Row]) -> None:
        if len(workers) == 2 and len(ledger.rows) >= 20:
            kill_a_node()
            workers.extend((added(), added()))
        if len(ledger.rows) >= 80 and driver.measured.lost:
            raise KeyboardInterrupt

    try:
        with cluster(nodes.address, None):
            driver = Driver(ledger, settings)
            driver.on_rows = first_run
            with pytest.raises(KeyboardInterrupt):
                driver.run()
        assert len(driver.measured.nodes) >= 3
        ledger.close()
        with ledger.path.open("a", encoding="ascii") as file:
            file.write('{"kind": "' + MARKED)  # the line that the driver was writing when it died
        before, done = Counter(marks.read_text().split()), {str(row.number) for row in ledger.rows}

        again = Ledger(ledger.path, {MARKED: 200}, {"seed": 0})
        again.open(resume=True)
        assert again.rows == ledger.rows
        with cluster(nodes.address, None):
            driver = Driver(again, settings)
            driver.on_rows = lambda _: kill_a_node() if len(workers) == 3 else None
            driver.run()
        again.close()
    finally:
        nodes.shutdown()
    _assert_complete(again)
    after = Counter(marks.read_text().split())
    assert {name for name in after if after[name] == before[name]} >= done  # what had an answer was not run again


def _assert_complete(ledger: Ledger) -> None:
    """Each of 200 items has one row, in memory and in the file; the page says what they came to."""
    read = Ledger(ledger.path, ledger.plan, ledger.settings)
    read.open(resume=True)
    read.close()
    assert read.rows == ledger.rows
    assert sorted(row.number for row in read.rows) == [*range(200)]
    assert ledger.left == ledger.twice == 0
    assert sorted(row.number for row in read.rows if row.is_wrong) == [*range(0, 200, 10)]
    ((cause, rows),) = summary.causes(read.rows).items()
    assert (cause, len(rows)) == (f"{MARKED}: output N of call N differs at xN", 20)
    assert summary.coverage(read.rows)[-1] == (200, 7)
    text = summary.page(read)
    assert "every one of 200 items is accounted for: 180 passed, 20 failed" in text
    assert cause in text


def test_a_ledger_counts_an_item_once_and_refuses_another_campaign(tmp_path: Path) -> None:
    """A second answer is no second item; another plan, or a campaign in the way, is refused."""
    ledger = Ledger(tmp_path / "results.jsonl", {"integers": 2}, {"seed": 0})
    ledger.open(resume=False)
    ledger.add([Row("integers", 0, "passed"), Row("integers", 1, "failed", message="first")])
    assert ledger.add([Row("integers", 1, "passed")]) == []
    ledger.close()
    assert [(row.state, row.message) for row in ledger.rows] == [("passed", ""), ("failed", "first")]
    with pytest.raises(UsageError, match="holds a campaign"):
        Ledger(ledger.path, {"integers": 2}, {"seed": 0}).open(resume=False)
    for line in ('{"kind": "nosuch"}', '{"kind": "integers", "number": 2}', '{"kind": "integers", "colour": 1}'):
        kept = ledger.path.read_text()
        ledger.path.write_text(f"{kept}{line}\n")
        with pytest.raises(UsageError, match=r"damaged in line 4: .*Delete that line"):
            Ledger(ledger.path, {"integers": 2}, {"seed": 0}).open(resume=True)
        ledger.path.write_text(kept)
    with pytest.raises(UsageError, match="there twice"):
        _plan(["integers=5", "integers=6"])
    with pytest.raises(UsageError, match=r"another campaign: its integers is 2, here 3; its seed is 0, here 1\n"):
        Ledger(ledger.path, {"integers": 3}, {"seed": 1}).open(resume=True)
    politer = Ledger(ledger.path, {"integers": 2}, {"seed": 0, "nice": 5})
    politer.open(resume=True)
    politer.close()


def test_a_cluster_that_is_nowhere_is_one_sentence() -> None:
    """The option, what was given, and what Ray says of it."""
    with (
        pytest.raises(UsageError, match=r"--address: no Ray cluster answers at 'nonsense' \(Invalid address"),
        cluster("nonsense", None),
    ):
        pass


def test_sigterm_ends_a_campaign_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Ray takes the signal for itself when it starts."""
    ray = pytest.importorskip("ray")

    def init(**_options: object) -> SimpleNamespace:
        signal.signal(signal.SIGTERM, lambda *_: None)
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    with interruptible() as stop, pytest.raises(KeyboardInterrupt), cluster("of nobody", None):
        signal.raise_signal(signal.SIGTERM)
    assert stop.status == 143


def test_the_driver_needs_no_torch() -> None:
    """The command names its kinds where no device has started: torch must come after the device."""
    program = (
        "import sys; from npugraph_ex.cli import main; main(['campaign', '--list']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fidelity" in done.stdout


@pytest.mark.slow
def test_a_kind_finds_a_fault_and_shrinks_it() -> None:
    """With a deliberate fault the kind of its programs fails, and gives a script of that failure; without it, nothing."""
    kind = KINDS["near-misses"]
    check = kind.opened(CampaignSettings())
    with client_operators(), mutant("fusion-closes-cycles"):
        number = next(number for number in range(60) if check(number).message)
        assert kind.shrink is not None
        script = kind.shrink(CampaignSettings(), number)
    assert "mutant='fusion-closes-cycles'" in script
    with client_operators():
        verdict = check(number)
    assert verdict.message == ""
    assert any(feature.startswith("near-miss: ") for feature in verdict.features)


@pytest.mark.parametrize(
    ("dtype", "wrong", "message", "upstream"),
    [
        ("float32", (), "", []),
        ("bfloat16", (), "", []),
        ("float32", ("npugraph_ex",), "sample 0: other values", []),
        ("float32", ("npugraph_ex", "aot_eager"), "", ["other values"]),
    ],
)
def test_an_operator_of_torch_s_database_is_compared(
    monkeypatch: pytest.MonkeyPatch, dtype: str, wrong: tuple[str, ...], message: str, upstream: list[str]
) -> None:
    """Right results pass, of one sample with `out` and gradients, too; wrong ones are a difference unless `aot_eager` has them."""
    case = next(
        case
        for case in strangers.operator_cases(CampaignSettings())
        if (strangers.database()[case.position].name, case.dtype) == ("atan2", getattr(torch, dtype))
        and not case.dynamic
    )

    def compile_wrongly(program: Callable[..., torch.Tensor], *, backend: str, dynamic: bool | None) -> object:
        return lambda *given: program(*given) + (1 if backend in wrong else 0)

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    monkeypatch.setattr(strangers, "_SAMPLES", 2)
    monkeypatch.setattr(strangers.database()[case.position], "inplace_variant", None)
    found = strangers.check_operator(CampaignSettings(), case)
    assert _kinds(found) == ([message] if message else upstream)
    assert found.label == f"atan2 {dtype} static"
    if not message:
        assert found.value["ran"] == 4


def _kinds(found: ItemAnswer) -> list[str]:
    """What differs, without how far."""
    return [
        re.sub(": [^ ]* units.*", "", text) for text in ([found.message] if found.message else found.value["upstream"])
    ]


@pytest.mark.parametrize(
    ("wrong", "message", "upstream"),
    [((), "", []), (("npugraph_ex",), "other values", []), (("npugraph_ex", "aot_eager"), "", ["other values"])],
)
def test_an_architecture_is_compared(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, ...], message: str, upstream: list[str]
) -> None:
    """As an operator: to the bit with eager mode, or else with torch's own plain backend."""

    def compile_wrongly(model: Callable[..., torch.Tensor], *, backend: str) -> object:
        return lambda *given: model(*given) + (1 if backend in wrong else 0)

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    found = check_architecture(CampaignSettings(), ArchitectureCase("DistilBERT", "forward"))
    assert _kinds(found) == ([message] if message else upstream)
    assert len(ARCHITECTURES) >= 40
    assert all(
        check_architecture(CampaignSettings(), ArchitectureCase(name, "generate")).skipped
        for name in ("DistilBERT", "UNet")
    )


@pytest.mark.slow
def test_tokens_of_a_lifted_decoder_may_differ_where_nobody_can_tell() -> None:
    """Another token is a fault where eager mode's logit is far above the next, and none where its error reaches that far."""
    eager = architecture_checks.generated("GPT-2", None)
    lifted = SimpleNamespace(sequences=eager.sequences.clone())
    assert architecture_checks.otherwise("GPT-2", eager, lifted) == ""
    first = lifted.sequences.shape[1] - len(eager.logits)
    best, second = eager.logits[0][0].topk(2).indices.tolist()
    lifted.sequences[0, first] = second
    assert f"token {first} is {second}, in eager mode {best}" in architecture_checks.otherwise("GPT-2", eager, lifted)
    eager.logits[0][0, second] = eager.logits[0][0, best] - 1e-3
    assert architecture_checks.otherwise("GPT-2", eager, lifted) == ""


def test_known_differences_explain_rows_and_go_stale() -> None:
    """A difference that is in the file has its reason in the table, another one has none; what no row shows any more is named."""
    row = {
        "state": "passed",
        "message": "",
        "label": "addcdiv float32 static",
        "value": {"upstream": ["other values: 0.07 units"]},
    }
    rows = [
        row,
        {**row, "label": "addcmul float32 static"},
        {**row, "label": "empty bool static", "value": {"upstream": []}},
    ]
    known = strangers_tables.known_differences()
    table = [line for line in strangers_tables.difference_rows(rows, known) if "addc" in line]
    assert [("**not explained**" in line, line.split()[-2]) for line in table] == [
        (True, "addcmul"),
        (False, "addcdiv"),
    ]
    assert [*strangers_tables.stale(rows, known)] == ["empty: other values", "addcmul: in place: other values: 0"]
