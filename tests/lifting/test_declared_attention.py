"""`every_row_attends`: attention by a plain softmax is lifted where the user declares that each row of scores has a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fx_helpers import aot_graph, optimise, targets
from random_tensors import tensors
from spelled_attention import SPELLED_SPECS
from spelled_softmax_attention import (
    DECLARED_ATTENTION,
    IN_HALF,
    NOT_SPELLED_ATTENTION,
    a_sum_that_is_filled,
    filled_by_the_least_number,
    kept_by_a_mask,
)
from torch.nn import functional

import npu_emulator
import npugraph_ex
from npugraph_ex.commands.advise import advising
from npugraph_ex.lifting import changes, judging
from npugraph_ex.lifting.forms import softmax_attention

HALF, BF16 = torch.float16, torch.bfloat16
DECLARED = {"lift": "judged", "every_row_attends": True}
FILLED = (filled_by_the_least_number, a_sum_that_is_filled, kept_by_a_mask)
STAYS = [function for function in NOT_SPELLED_ATTENTION if function not in DECLARED_ATTENTION]
LIFTED = [
    (function, dtype)
    for function in DECLARED_ATTENTION
    for dtype in (HALF, BF16)
    if dtype == HALF or function not in IN_HALF
]
_VIEWS = {"transpose", "permute", "view", "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "expand", "clone"}


@pytest.fixture(autouse=True)
def _judged_anew() -> Iterator[None]:
    judging.forget()
    yield
    judging.forget()


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.inference_mode()(torch.compile(function, backend="npugraph_ex", options=options, dynamic=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dtype"), LIFTED, ids=[f"{function.__name__}-{str(dtype)[6:]}" for function, dtype in LIFTED]
)
def test_is_lifted_where_it_is_declared(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """One operator is left beside the mask, the report names the declaration, and the values are those of float64."""
    given = tensors(SPELLED_SPECS, dtype)
    given[3][..., 0] = 0.0  # each row keeps its first key
    gm = aot_graph(function, *given)
    report = optimise(gm, **DECLARED)
    assert report.fusions("lift_attention") == 1, report.table()
    left = [name for name in targets(gm) if name not in _VIEWS and (dtype == HALF or name != "mul")]
    wanted = DECLARED_ATTENTION[function]
    assert left == (wanted if dtype == HALF else wanted.replace("v2", "v3")).split()  # scaled in front: see IN_BF16
    (fusion,) = next(record.fusions for record in report.rules if record.name == "lift_attention")
    assert fusion.assumes == "every_row_attends"
    assert "every_row_attends=True, and not proven: lift_attention rests on it at 1 place." in report.table()
    result = _compiled(function, **DECLARED)(*given)
    truth = function(*(value.cpu().double() for value in given))
    far, eager = ((value.cpu().double() - truth).abs().max() for value in (result, function(*given)))
    assert far <= max(eager, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("function", STAYS, ids=lambda function: function.__name__)
def test_other_near_misses_stay(function: Callable[..., Any]) -> None:
    """What is another function in rows that have a key is none for the declaration."""
    gm = aot_graph(function, *tensors(SPELLED_SPECS, HALF))
    before = targets(gm)
    report = optimise(gm, **DECLARED)
    assert report.fusions() == 0, report.table()
    assert targets(gm) == before
    assert NOT_SPELLED_ATTENTION[function] in " / ".join(miss.reason for miss in report.near_misses())


def _filled(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    return (q @ k.mT * 0.25).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def _masked() -> tuple[torch.Tensor, ...]:
    """Inputs whose last row of scores is masked everywhere."""
    q, k, v, bias = tensors(SPELLED_SPECS, HALF)
    hidden = bias > 2.0
    hidden[..., 0], hidden[:, :, -1] = False, True
    return q, k, v, hidden


@pytest.mark.slow
def test_equal_layers_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a declaration or another spelling would win is found out for the first one, though the scores have other names."""
    asked: list[str] = []

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **settings: (asked.append(name), real(*given, **settings))[1])

    counted(judging, "_judged")
    counted(changes, "traced")
    q, k, v, hidden = _masked()
    many = aot_graph(lambda q: _filled(_filled(_filled(q, k, v, hidden), k, v, hidden), k, v, hidden), q)
    one = aot_graph(lambda q: _filled(q, k, v, hidden), q)
    misses = [optimise(gm, lift="judged").near_misses("lift_attention") for gm in (many, one)]
    assert [len(found) for found in misses] == [3, 1]
    assert {(miss.option_saves, miss.would_save) for found in misses for miss in found} == {
        (misses[1][0].option_saves, misses[1][0].would_save)
    }
    assert asked.count("traced") == 2  # one for each graph
    assert 0 < asked.count("_judged") <= 2  # the declared operator, and torch's own


@pytest.mark.slow
def test_nothing_is_lifted_undeclared_and_the_option_is_named() -> None:
    """The near-miss and the advice have the option, and promise the kernels that it wins."""

    def launched(**options: Any) -> int:
        compiled = _compiled(_filled, **options)
        for _ in range(3):
            compiled(*given)
        torch.npu.synchronize()
        with npu_emulator.kernel_log() as log:
            compiled(*given)
            torch.npu.synchronize()
        return len(log)

    given = _masked()
    with advising() as found:
        before = launched(lift="judged")
    report = npugraph_ex.last_report()
    after = launched(**DECLARED)
    assert report is not None
    (miss,) = report.near_misses("lift_attention")
    assert miss.reason.endswith("every_row_attends=True declares that there is no such row")
    assert miss.option == "every_row_attends"
    (advice,) = (one for one in found.advice if one.rule == "lift_attention" and one.kind == "declaration")
    assert '"every_row_attends": True' in advice.change
    assert before - after == advice.saves.kernels == miss.option_saves.kernels > 0
    assert [one.kind for one in found.advice if one.rule == "lift_attention"].count("spelling") == 1


@pytest.mark.slow
def test_a_false_declaration_shows() -> None:
    """Eager mode has NaN in a row that is masked everywhere, the operator 0; `check_numerics` compares the call's own inputs."""
    given = _masked()
    expected = _filled(*given).cpu()
    assert bool(expected[:, :, -1].isnan().all())
    result = _compiled(_filled, **DECLARED)(*given).cpu()
    torch.testing.assert_close(result[:, :, :-1], expected[:, :, :-1], rtol=2e-3, atol=2e-3)
    assert not bool(result.isnan().any())
    compared = _compiled(_filled, **DECLARED, check_numerics=True)(*given)
    report = npugraph_ex.last_report()
    assert report is not None
    assert {record.name: record.outcome for record in report.passes}["lifting"] == "rolled back", report.table()
    assert torch.equal(compared.cpu().isnan(), expected.isnan())


@pytest.mark.parametrize("function", FILLED, ids=lambda function: function.__name__)
def test_the_judge_compares_all_rows_without_the_declaration(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the form to propose it and to assume nothing, the judge would find rows whose filled scores are the largest."""
    monkeypatch.setattr(softmax_attention, "_against", lambda *_: "")
    report = optimise(aot_graph(function, *tensors(SPELLED_SPECS, HALF)), lift="judged")
    assert report.fusions("lift_attention") == 0, report.table()
    assert "farther from float64" in report.near_misses("lift_attention")[0].reason


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the mask the other way round": (
        "_hidden",
        lambda original: lambda emit, filled, *how: original(emit, replace(filled, keeps=not filled.keeps), *how),
    ),
    "one key further": (
        "_hidden", lambda original: lambda emit, *how: emit(torch.ops.aten.roll.default, original(emit, *how), [1], [-1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_refuses_another_mask(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have a key are compared, so that a wrong mask is found in them."""
    name, change = FAULTS[fault]
    monkeypatch.setattr(softmax_attention, name, change(getattr(softmax_attention, name)))
    report = optimise(aot_graph(_filled, *_masked()), **DECLARED)
    assert report.fusions("lift_attention") == 0, report.table()
    reason = report.near_misses("lift_attention")[0].reason
    assert "farther from float64" in reason or "infinite or NaN" in reason


def test_dropout_stays() -> None:
    """Weights that are dropped at random are no attention of the operator's; in an evaluation nothing is dropped."""

    def attend(q: Any, k: Any, v: Any, _: Any, *, training: bool) -> Any:
        return functional.dropout((q @ k.mT * 0.25).softmax(-1), 0.5, training=training) @ v

    given = tensors(SPELLED_SPECS, HALF)
    lifted = {
        training: optimise(aot_graph(partial(attend, training=training), *given), **DECLARED).fusions("lift_attention")
        for training in (True, False)
    }
    assert lifted == {True: 0, False: 1}


@pytest.mark.slow
def test_queries_by_position_are_copied_where_the_operator_keeps_their_strides() -> None:
    """As BERT has it with a mask that is added: the second version's result lies as its queries do."""

    def attend(x: Any, bias: Any) -> Any:
        q, k, v = (one.unflatten(-1, (4, 16)).transpose(1, 2) for one in (x, x * 2, x * 3))
        return torch.softmax(q @ k.transpose(2, 3) * 0.3 + bias, -1) @ v

    given = tensors(((2, 5, 64), (2, 1, 1, 5)), HALF)
    report = optimise(aot_graph(attend, *given), **DECLARED)
    assert report.fusions("lift_attention") == 1, report.table()
    result, expected = _compiled(attend, **DECLARED)(*given), attend(*given)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=4e-3)
