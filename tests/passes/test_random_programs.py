"""Random programs of views, in-place writes, mutated and aliased inputs: the backend against eager mode, exactly.

Values are integers, so nothing is a matter of tolerance. Each program is called three times with new values and addresses,
with every result kept alive until all are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_helpers import aot_metadata, describe
from functorch.compile import aot_function
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from npugraph_ex import last_report
from npugraph_ex.frontend.entry.backend import compile_fx
from npugraph_ex.frontend.upstream_repairs.layouts import KeepLayouts

PROGRAMS = int(os.environ.get("NPUGRAPH_EX_RANDOM_PROGRAMS", "128"))
SHARDS = 4
SIZE = 4

VIEWS: dict[str, tuple[str, Callable[[tuple[int, ...]], tuple[int, ...] | None]]] = {
    "t": ("{a}.t()", lambda s: s[::-1] if len(s) == 2 else None),
    "tail": ("{a}[1:]", lambda s: (s[0] - 1, *s[1:]) if s and s[0] > 1 else None),
    "head": ("{a}[:-1]", lambda s: (s[0] - 1, *s[1:]) if s and s[0] > 1 else None),
    "every_other": ("{a}[::2]", lambda s: ((s[0] + 1) // 2, *s[1:]) if s and s[0] > 1 else None),
    "row": ("{a}[0]", lambda s: s[1:] if len(s) == 2 else None),
    "column": ("{a}.select(-1, 1)", lambda s: s[:-1] if len(s) == 2 and s[1] > 1 else None),
    "same": ("{a}.view({a}.shape)", lambda s: s),
    "all": ("{a}[:]", lambda s: s),
    "diagonal": ("{a}.diagonal()", lambda s: (min(s),) if len(s) == 2 else None),
}
UNARY = (
    "{a} + 1",
    "{a} * 3",
    "-{a}",
    "{a}.clone()",
    "{a}.abs()",
    "{a}.clamp(-5, 5)",
    "{a}.relu()",
    "{a} + {a}",
    "{a} * 1",
)
BINARY = ("{a} + {b}", "{a} - {b}", "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})")
WRITE_ALONE = ("{a}.add_(2)", "{a}.mul_(3)", "{a}.zero_()", "{a}.neg_()", "{a}.fill_(7)", "{a}[:] = {a} * 3")
WRITE_FROM = ("{a}.copy_({b})", "{a}.add_({b})", "{a}.sub_({b})", "torch.add({b}, 1, out={a})", "{a}[:] = {b}")
STORE = ("{a}[0] = {b}", "{a}[-1] = 5", "{a}[1:] = 2")


@dataclass(frozen=True)
class Program:
    """A function body over inputs x0, x1, x2, and how the inputs relate.

    Attributes:
        lines: statements; values are named x0.. and v0...
        results: the names returned.
        aliased: whether x1 is handed over as a view of x0.
    """

    lines: tuple[str, ...]
    results: tuple[str, ...]
    aliased: bool

    @property
    def source(self) -> str:
        """The program as Python."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program(x0, x1, x2):\n{body}    return [{', '.join(self.results)}]\n"


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of two to twelve statements, each legal for the shapes and memory it meets."""
    aliased = draw(st.booleans())
    shapes: dict[str, tuple[int, ...]] = {
        "x0": (SIZE, SIZE),
        "x1": (SIZE - 1, SIZE) if aliased else (SIZE, SIZE),
        "x2": (SIZE, SIZE),
    }
    memory = {"x0": "x0", "x1": "x0" if aliased else "x1", "x2": "x2"}
    lines: list[str] = []
    for _ in range(draw(st.integers(2, 12))):
        a = draw(st.sampled_from(sorted(shapes)))
        line = draw(st.sampled_from(_choices(a, shapes, memory)))
        name = f"v{len(shapes) - 3}"
        kind, text, shape, root = line
        lines.append(text if kind == "write" else f"{name} = {text}")
        if kind == "new":
            shapes[name], memory[name] = shape, root or name
    results = draw(st.lists(st.sampled_from(sorted(shapes)), min_size=1, max_size=4, unique=True))
    return Program(tuple(lines), tuple(results), aliased)


def _choices(
    a: str, shapes: dict[str, tuple[int, ...]], memory: dict[str, str]
) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Every statement that may follow: (kind, text, shape of the new value, whose memory it lies in or '')."""
    shape = shapes[a]
    found: list[tuple[str, str, tuple[int, ...], str]] = []
    for text, rule in VIEWS.values():
        new = rule(shape)
        if new:
            found.append(("new", text.format(a=a), new, memory[a]))
    found += [("new", text.format(a=a), shape, "") for text in UNARY]
    found += [("write", text.format(a=a), shape, "") for text in WRITE_ALONE]
    for b, other in shapes.items():
        if other != shape:
            if len(shape) == 2 and other == shape[1:] and memory[b] != memory[a]:
                found.append(("write", STORE[0].format(a=a, b=b), shape, ""))
            continue
        found += [("new", text.format(a=a, b=b), shape, "") for text in BINARY]
        found.append(("new", f"torch.cat([{a}, {b}])", (2 * shape[0], *shape[1:]), ""))
        if memory[b] != memory[a]:  # a write from overlapping memory is undefined in eager mode too
            found += [("write", text.format(a=a, b=b), shape, "") for text in WRITE_FROM]
    if shape and shape[0] > 1:
        found += [("write", text.format(a=a), shape, "") for text in STORE[1:]]
    return found


def _inputs(program: Program, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x0, x1, x2 = (torch.randint(-9, 9, (SIZE, SIZE), generator=generator, dtype=torch.int32).npu() for _ in range(3))
    return [x0, x0[1:] if program.aliased else x1, x2]


def _sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which of the tensors lie in one storage."""
    keys = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [(i, j) for i in range(len(keys)) for j in range(i) if keys[i] == keys[j]]


def run_both(program: Program, **options: Any) -> None:
    """Run a program eagerly and compiled, and demand equal values, metadata, aliasing and input contents."""
    names: dict[str, Any] = {"torch": torch}
    exec(program.source, names)  # noqa: S102 - the text is ours
    function = names["program"]
    compiled = _through_aot(function, lambda gm, inputs: compile_fx(gm, inputs, options))
    kept = []
    for call in range(3):
        eager_inputs, inputs = _inputs(program, call), _inputs(program, call)
        with torch.no_grad(), aot_metadata():
            expected, got = list(function(*eager_inputs)), list(compiled(*inputs))
        kept.append((expected + eager_inputs, got + inputs))
    report = last_report()
    # A pass that had to be rolled back left values right and is wrong all the same.
    assert report is None or "rolled back" not in [record.outcome for record in report.passes], program.source
    for expected, got in kept:
        assert _sharing(expected) == _sharing(got), program.source
        for want, have in zip(expected, got, strict=True):
            assert describe(want) == describe(have), program.source
            assert torch.equal(want.cpu(), have.cpu()), program.source


def _through_aot(function: Callable[..., Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    def as_our_frontend_does(*inputs: torch.Tensor) -> Any:
        with KeepLayouts():
            return function(*inputs)

    compiled: Callable[..., Any] = aot_function(
        as_our_frontend_does, fw_compiler=compiler, keep_inference_input_mutations=True
    )
    return compiled


def _property(examples: int, **options: bool) -> Callable[[int], None]:
    """Make a test over `examples` random programs, a different set for each shard."""

    def run_shard(shard: int) -> None:
        @seed(shard)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(programs())
        def check(program: Program) -> None:
            run_both(program, **options)

        check()

    return run_shard


# Shards, so that several processes can share the work.
@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs_equal_eager(shard: int) -> None:
    """No program of views and writes tells the backend from eager mode."""
    _property(PROGRAMS // SHARDS)(shard)


@pytest.mark.slow
def test_random_programs_equal_eager_without_the_memory_passes() -> None:
    """The same holds with the memory passes switched off."""
    switched_off = ("inplace_pass", "input_inplace_pass", "remove_noop_ops", "remove_cat_ops")
    _property(30, **dict.fromkeys(switched_off, False))(SHARDS)


def test_a_result_written_through_a_view_of_another_layout() -> None:
    """Random programs found it: AOT gave the whole the layout that its view had been given."""
    lines = ("v0 = x0.t()", "v1 = v0 + 1", "v2 = v1.t()", "torch.add(v0, 1, out=v2)")
    run_both(Program(lines=lines, results=("v0", "v1"), aliased=False))
