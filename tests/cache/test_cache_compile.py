"""Compilations that are kept on disk: equal values wherever they are read, and never where they do not fit."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cached_models
import pytest
import torch
import torch_npu

from npugraph_ex import CompilerConfig, cache_key, scope
from npugraph_ex.cache import key
from npugraph_ex.cache.key import key_parts
from npugraph_ex.cache.store import SUFFIX, read_entry
from npugraph_ex.errors import NpuGraphExError, OptionError, OptionValueError
from npugraph_ex.inference import cache_compile, readable_cache
from npugraph_ex.inference.cached import CachedFunction
from npugraph_ex.report.graphs import graphs_so_far

FOLDER = str(Path(__file__).parent)

OTHER_PROCESS = f"""
import sys
sys.path.insert(0, {FOLDER!r})
import npu_emulator
npu_emulator.activate(quiet=True)
import cached_models
from npugraph_ex.inference import cache_compile
from npugraph_ex.report.graphs import graphs_so_far
model = cached_models.model()
compiled = cache_compile(model.forward, cache_dir={{directory!r}})
cached_models.check(compiled, model, 4, 7)
answer = graphs_so_far()
"""

SEVERAL_PROCESSES = f"""
import multiprocessing, os, sys
from functools import partial
sys.path.insert(0, {FOLDER!r})
import npu_emulator
npu_emulator.activate(quiet=True)
import cached_models
from npugraph_ex.inference import cache_compile
from npugraph_ex_conformance.forked import forked

def child(told):
    os.dup2(told, 2)  # what a person would see
    all_run.wait()
    model = cached_models.model()
    cached_models.check(cache_compile(model.forward, cache_dir={{directory!r}}), model, 4, 7)
    return True

files = [os.memfd_create("told") for _ in range(3)]
all_run = multiprocessing.Barrier(len(files))
answer = [forked(*[partial(child, told) for told in files]), [os.pread(told, 100000, 0).decode() for told in files]]
"""


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The one file that compiling the model leaves."""
    directory = tmp_path_factory.mktemp("kept")
    model = cached_models.model()
    cached_models.check(cache_compile(model.forward, cache_dir=directory), model, 4, 7)
    (path,) = _files(directory)
    return path.name.encode() + b"\n" + path.read_bytes()


@pytest.fixture
def directory(kept: bytes, tmp_path: Path) -> Path:
    """A folder with that file, for one test to spoil."""
    name, _, content = kept.partition(b"\n")
    path = tmp_path / name.decode()
    path.write_bytes(content)
    path.chmod(0o600)
    return tmp_path


def _compiled_again(directory: Path, model: cached_models.Model, *rows: int, **how: Any) -> int:
    """Use the folder as a new process would, compare values, and say how many graphs were compiled."""
    before = graphs_so_far()
    cached_models.check(cache_compile(model.forward, cache_dir=directory, **how), model, *rows)
    return graphs_so_far() - before


def test_a_fresh_process_compiles_nothing(tmp_path: Path, ask: Callable[..., Any]) -> None:
    """A second one gets equal values, buffers included, for two batch sizes, without tracing or passes.

    Both are fresh: these tests' own process may have more registered that a compilation takes for granted.
    """
    program = OTHER_PROCESS.format(directory=str(tmp_path))
    assert [ask(program), ask(program)] == [1, 0]


@pytest.mark.slow
def test_what_is_kept_is_used(directory: Path) -> None:
    """A new object for the same method, with other parameters in the same places, reads the file and compiles nothing."""
    model = cached_models.model()
    model.weight.data = model.weight.data * 0.5
    assert _compiled_again(directory, model, 4, 7, 4, 2) == 0
    assert len(_files(directory)) == 1


@pytest.mark.slow
def test_other_shapes_are_compiled_and_never_broadcast(directory: Path) -> None:
    """One row, which would broadcast, and other strides: compiled anew, right, and kept beside the first."""
    model = cached_models.model()
    assert _compiled_again(directory, model, 1) == 1
    assert len(_files(directory)) == 2
    assert _compiled_again(directory, model, 1, 5) == 0
    mine, eager = cached_models.model(), cached_models.model()
    turned = cached_models.batch(cached_models.WIDTH).t()
    result = cache_compile(mine.forward, cache_dir=directory)(turned)["y"]
    torch.testing.assert_close(result.cpu(), eager(turned)["y"].cpu(), rtol=0, atol=0, equal_nan=True)
    assert len(_files(directory)) == 3


class _OfSizes(torch.nn.Module):
    """Methods whose sizes meet in conditions with max, min and a division."""

    def chunked(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return first.sigmoid() * second

    def narrowed(self, x: torch.Tensor) -> torch.Tensor:
        return x[: min(x.shape[0], x.shape[1] - 8)] + 1

    def best(self, x: torch.Tensor) -> torch.Tensor:
        return x.topk(2, -1).values


@pytest.mark.parametrize("name", ["chunked", "narrowed", "best"])
def test_conditions_on_sizes_are_read_again(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second object reads what the first one wrote, for other sizes too; nothing is said of it."""
    method, made = getattr(_OfSizes(), name), []
    for _ in range(2):
        before = graphs_so_far()
        compiled = cache_compile(method, cache_dir=tmp_path)
        with torch.inference_mode():
            for rows, columns in ((4, 16), (6, 12)):
                x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).npu()
                assert torch.equal(compiled(x), method(x))
        made.append(graphs_so_far() - before)
    assert made[0] > 0 == made[1]
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_fixed_sizes(tmp_path: Path) -> None:
    """With dynamic=False each size is a compilation of its own, found again by its size."""
    model = cached_models.model()
    assert _compiled_again(tmp_path, model, 4, 5, dynamic=False) == 2
    assert _compiled_again(tmp_path, model, 5, 4, dynamic=False) == 0
    assert _compiled_again(tmp_path, model, 6, dynamic=False) == 1


def test_three_processes_at_once(tmp_path: Path, ask: Callable[..., Any]) -> None:
    """Three start together on a damaged file: right values in each, one whole file, no scrap, and a person is told.

    What is said goes to standard error without any logging being set up; who came late found what another had mended.
    The file is another such process's, as this one may have more registered that a compilation takes for granted.
    """
    directory = tmp_path / "kept"
    ask(OTHER_PROCESS.format(directory=str(directory)))
    (path,) = _files(directory)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    are_right, told = ask(SEVERAL_PROCESSES.format(directory=str(directory)))
    assert are_right == 3 * [True], told
    assert [file.name for file in directory.iterdir()] == [path.name]
    assert read_entry(path).payload
    assert any(re.search(r"The saved compilation .* is not used and made anew: .* cut off", said) for said in told)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"mul", b"add", 1)),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR."),
        lambda path: path.chmod(0o666),
        lambda path: (path.rename(path.with_suffix(".moved")), path.symlink_to(path.with_suffix(".moved"))),
    ],
    ids=["cut off", "changed", "empty", "a foreign pickle", "writable by all", "a link"],
)
def test_a_file_that_cannot_be_trusted_is_made_anew(directory: Path, spoil: Callable[[Path], object]) -> None:
    """It is not read: one compilation, right values, and afterwards a file that is good again."""
    (path,) = _files(directory)
    spoil(path)
    model = cached_models.model()
    assert _compiled_again(directory, model, 4) == 1
    assert _compiled_again(directory, model, 4) == 0


def test_a_file_of_another_user_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the file counts, whatever its content."""
    (path,) = _files(directory)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert _compiled_again(directory, cached_models.model(), 4) == 1


@pytest.mark.slow
def test_globals_and_attributes_are_part_of_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global constant, a number and a function held by the module: each change shows in the values at once."""
    model = cached_models.model()
    model.gain = 5.0
    assert _compiled_again(directory, model, 4) == 1
    model.activation = torch.nn.functional.silu
    assert _compiled_again(directory, model, 4) == 1
    monkeypatch.setattr(cached_models, "FACTOR", 7.0)
    assert _compiled_again(directory, cached_models.model(), 4) == 1
    monkeypatch.undo()
    assert _compiled_again(directory, cached_models.model(), 4) == 0


@pytest.mark.slow
def test_what_a_function_closes_over(tmp_path: Path) -> None:
    """A number in the closure is part of the name; a tensor is an input, whatever it holds."""

    def make(factor: float, shift: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x * factor + shift

        return function

    x = cached_models.batch(3)
    for factor, seed, new in ((2.0, 1, 1), (4.0, 1, 1), (2.0, 1, 0)):
        shift = cached_models.batch(1, seed)[0]
        before = graphs_so_far()
        result = cache_compile(make(factor, shift), cache_dir=tmp_path)(x)
        assert torch.equal(result.cpu(), (x * factor + shift).cpu())
        assert graphs_so_far() - before == new


TABLE = torch.zeros(3)


def test_tensors_of_globals_and_closures_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file has none of their values, whatever their size, torch_npu has no reason for its warning, and a call has its own."""

    def make(shift: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * TABLE + shift

    monkeypatch.setattr(torch_npu.utils.serialization, "ALWAYS_WARN_LEGACY_SERIALIZATION", True)
    x = torch.ones(100_000, device="npu")
    for value, new in ((2.0, 1), (3.0, 0)):
        monkeypatch.setitem(globals(), "TABLE", x * value)
        before = graphs_so_far()
        assert cache_compile(make(x * 5), cache_dir=tmp_path, dynamic=False)(x).eq(value + 5).all().item()
        assert graphs_so_far() - before == new
    (path,) = _files(tmp_path)
    assert path.stat().st_size < 100_000
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_source_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's own text is in the key; a helper's, which only tracing reaches, is compared line by line."""
    source = (
        "import torch\n\n\nclass Inner(torch.nn.Module):\n    def forward(self, x):\n        return x + {number}\n\n\n"
        "class Outer(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.inner = Inner()\n\n    def forward(self, x):\n        return self.inner(x) * {factor}\n"
    )
    file = tmp_path / "changing_module.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    x = cached_models.batch(3)
    for number, factor, new in ((1, 2, 1), (1, 2, 0), (5, 2, 1), (5, 3, 1)):
        file.write_text(source.format(number=number, factor=factor))
        importlib.invalidate_caches()
        sys.modules.pop("changing_module", None)
        module = importlib.import_module("changing_module")
        importlib.import_module("linecache").checkcache(str(file))
        before = graphs_so_far()
        result = cache_compile(module.Outer().forward, cache_dir=tmp_path / "kept")(x)
        assert torch.equal(result.cpu(), ((x + number) * factor).cpu())
        assert graphs_so_far() - before == new


def test_the_key_covers_options_scopes_levels_and_ranks(tmp_path: Path) -> None:
    """Each gives the file another name; equal ones give the same."""
    model = cached_models.model()

    def name(**how: Any) -> str:
        return cache_compile(model.forward, cache_dir=tmp_path, **how)._base  # type: ignore[attr-defined]

    plain = name()
    others = [
        name(options={"inplace_pass": False}),
        name(dynamic=False),
        name(tp_rank=0),
        name(tp_rank=1),
        name(pp_rank=1),
    ]
    with scope.deterministic(1):
        others.append(name())
    with scope.limit_core_num(4, 8):
        others.append(name())
    assert plain == name()
    assert len({plain, *others}) == len(others) + 1
    assert "tp1" in name(tp_rank=1)


@pytest.mark.parametrize("name", ["npugraph_ex", "torch", "torch_npu", "python", "device"])
def test_the_key_covers_what_is_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of anything that takes part, or another device: another key, and the part says which."""
    before, parts = cache_key(), key_parts()
    with monkeypatch.context() as patch:
        if name == "npugraph_ex":
            patch.setattr(key, "__version__", "99")
        elif name == "torch":
            patch.setattr(torch, "__version__", "99")
        elif name == "torch_npu":
            patch.setattr(key, "_torch_npu", lambda: "99")
        elif name == "python":
            patch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
        else:
            patch.setattr(torch.npu, "get_device_name", lambda: "Ascend99")
        assert cache_key() != before
        assert {part for part, said in key_parts().items() if parts[part] != said} == {name}
    assert cache_key() == before


def test_what_cannot_be_kept_is_compiled_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Inputs that share memory, one of them written, are AOT's to sort out: no file, one warning, and right results."""

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    compiled = cache_compile(written, cache_dir=tmp_path, dynamic=False)
    for seed in (1, 2):
        mine, eager = cached_models.batch(6, seed), cached_models.batch(6, seed)
        assert torch.equal(compiled(mine[:4], mine[2:]).cpu(), written(eager[:4], eager[2:]).cpu())
        assert torch.equal(mine.cpu(), eager.cpu())
    assert _files(tmp_path) == []
    assert len([record for record in caplog.records if "not kept" in record.message]) == 1


@pytest.mark.slow
def test_results_carry_no_gradient(directory: Path) -> None:
    """It is for inference: parameters that require a gradient change nothing."""
    model = cached_models.model().requires_grad_()
    result = cache_compile(model.forward, cache_dir=directory)(cached_models.batch(4))
    assert not result["y"].requires_grad


def test_parameters_that_have_gradients(tmp_path: Path) -> None:
    """As after training: the next process reads the file, whether its parameters have gradients or not."""
    for trained in (True, True, False):
        model = cached_models.model().requires_grad_()
        for parameter in model.parameters() if trained else ():
            parameter.grad = torch.ones_like(parameter)
        is_first = not _files(tmp_path)
        assert _compiled_again(tmp_path, model, 4) == is_first
        assert len(_files(tmp_path)) == 1


def test_wrong_declarations() -> None:
    """What is no function, an unknown option, and a graph in pieces are refused at once."""
    model = cached_models.model()
    with pytest.raises(NpuGraphExError, match="takes a function or a method"):
        cache_compile(model)
    with pytest.raises(OptionError, match="no option"):
        cache_compile(model.forward, options={"inplace": True})
    with pytest.raises(OptionValueError, match=r"config takes a CompilerConfig, got 3 \(int\)"):
        cache_compile(model.forward, config=3)
    with pytest.raises(NpuGraphExError, match="fullgraph=False"):
        cache_compile(model.forward, fullgraph=False)


def test_the_callers_config_stays_as_it_is(tmp_path: Path) -> None:
    """Options on top of a config are this compilation's alone."""
    config = CompilerConfig()
    config.capture_limit = 3
    compiled = cache_compile(
        cached_models.model().forward, config=config, options={"capture_limit": 5}, cache_dir=tmp_path
    )
    assert config.capture_limit == 3
    assert compiled._config.capture_limit == 5


def test_the_path_through_torch_npu(directory: Path) -> None:
    """`torch.npu.npugraph_ex.inference.cache_compile` is this one."""
    compiled = torch.npu.npugraph_ex.inference.cache_compile(
        cached_models.model().forward, options={"capture_limit": 8}
    )
    assert isinstance(compiled, CachedFunction)


def test_readable(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text names inputs, versions and source, and its graph is Python that computes the same."""
    (path,) = _files(directory)
    text = readable_cache(path, file=tmp_path / "shown.txt")
    assert capsys.readouterr().out == text == (tmp_path / "shown.txt").read_text()
    assert torch.__version__ in text
    names: dict[str, Any] = {}
    exec(text[text.index("import operator") :], names)  # noqa: S102 - the graph as it is shown
    model = cached_models.model()
    arguments = {"weight": model.weight, "calls": model.calls, "x": cached_models.batch(4)}
    order = re.findall(r"^(L_\w+|s\d+) ", text, flags=re.MULTILINE)
    given = [next((arguments[key] for key in arguments if f"_{key}_" in name), 4) for name in order]
    result = names["GraphModule"]()(*given)[0]
    want = cached_models.model()(cached_models.batch(4))["y"]
    torch.testing.assert_close(result.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_kept_after_a_compilation_with_gradients(tmp_path: Path) -> None:
    """The grad mode of another function's compilation is no guard of this one."""
    model = cached_models.model()
    torch.compile(torch.sin, backend="npugraph_ex")(torch.ones(4, device="npu"))
    cached_models.check(cache_compile(model.forward, cache_dir=tmp_path), model, 4)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


@pytest.mark.slow
def test_a_view_of_an_argument_is_one_in_inference_mode(tmp_path: Path) -> None:
    """The captures that read a file work in the mode of the call; a view of an argument shares its version counter."""
    for _ in range(2):  # which compiles, and which reads the file
        torch.compiler.reset()
        x = torch.ones(4, 4, device="npu")
        with torch.inference_mode():
            result = cache_compile(_lower_half, cache_dir=tmp_path)(x)
        result.add_(1)
        assert result._base is x
        assert x._version == 1


class _Scaling:
    """A number in an attribute, which the graph has not where it is compared only."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the argument, whatever the mode is."""
        if self.mode == "sum":
            return x + x
        return x + x


@pytest.mark.slow
def test_one_graph_for_arguments_of_two_kinds_is_kept_twice(tmp_path: Path) -> None:
    """An ordinary and an inference tensor, and two values of an attribute: each has its file, which the next process reads."""
    compiled = []
    for _ in range(2):
        before = graphs_so_far()
        calls = {mode: cache_compile(_Scaling(mode).run, cache_dir=tmp_path) for mode in ("sum", "product")}
        ordinary = torch.ones(4, device="npu")
        with torch.inference_mode():
            for x in (ordinary, torch.ones(4, device="npu")):
                for call in calls.values():
                    assert call(x).tolist() == [2.0] * 4
        compiled.append(graphs_so_far() - before)
    assert compiled == [4, 0]
    assert len(_files(tmp_path)) == 4


def _lower_half(x: torch.Tensor) -> torch.Tensor:
    return x[2:]
