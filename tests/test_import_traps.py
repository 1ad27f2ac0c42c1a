"""The traps of import: importing the library changes nothing of the program, and every path that older scripts use leads here."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npugraph_ex

Ask = Callable[..., Any]

# What a library could change behind a program's back, as text, so that two states can be compared.
STATE = """
import atexit, builtins, faulthandler, gc, logging, os, signal, sys, threading, warnings
import torch, torch_npu, torch._dynamo, torch._inductor.pattern_matcher, functorch.compile

def owners():
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("torch", "torch_npu", "functorch")]
    classes = [torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.fx.Graph, torch.fx.GraphModule, torch.fx.Node,
               torch.npu.NPUGraph, torch.npu.Stream, torch.npu.Event, torch.library.Library, torch._ops.OpOverload]
    return modules + classes

def functions():
    return {(repr(owner)[:80], name): value for owner in owners() for name, value in list(vars(owner).items())
            if callable(value)}

def state():
    return {
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook,
                  sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), builtins.__import__)],
        "warnings": repr(warnings.filters) + repr(warnings.showwarning),
        "finders": [repr(type(finder)) for finder in sys.meta_path] + [repr(hook) for hook in sys.path_hooks],
        "exits": atexit._ncallbacks(),
        "faults": faulthandler.is_enabled(),
        "collector": [gc.isenabled(), gc.get_threshold(), repr(gc.callbacks)],
        "logging": [repr(logging.root.handlers), logging.root.level, repr(logging.getLoggerClass())],
        "environment": dict(os.environ),
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
                  torch.are_deterministic_algorithms_enabled()],
        "threads": threading.active_count(),
    }

before, known = state(), functions()
import npugraph_ex
import npugraph_ex.config, npugraph_ex.ops, npugraph_ex.scope, npugraph_ex.inference, npugraph_ex.compat.torchair
import npugraph_ex.frontend.entry.backend, npugraph_ex.aclgraph, npugraph_ex.integrations.vllm.compiler
after, now = state(), functions()
answer = {
    "changed": {name: [before[name], after[name]] for name in before if before[name] != after[name]},
    "patched": [f"{owner}.{name}" for (owner, name), value in known.items() if now.get((owner, name)) is not value],
    "looked at": len(known),
}
"""


def test_import_changes_nothing_of_the_program(ask: Ask) -> None:
    """Signal handlers and monkey-patches at import: no handler, hook, filter, setting or function of torch is another after it."""
    found = ask(STATE)
    assert found["changed"] == {}
    assert found["patched"] == []
    assert found["looked at"] > 5000


FIRST = """
import sys, torch
assert "torch._dynamo" not in sys.modules  # so that the library imports it, in the middle of its own imports
from npugraph_ex.testing import check
from npugraph_ex_autoload import failures
answer = {"dynamo": "torch._dynamo" in sys.modules, "failures": failures}
"""


@pytest.mark.slow
def test_dynamo_is_prepared_if_the_library_imports_it_first(ask: Ask) -> None:
    """torch_npu asks for the backend while dynamo is imported: here while this library's own modules are half imported."""
    assert ask(FIRST) == {"dynamo": True, "failures": {}}


TORCHAIR = (
    ("torchair", "CompilerConfig"),
    ("torchair", "get_npu_backend"),
    ("torchair", "get_compiler"),
    ("torchair", "register_replacement"),
    ("torchair", "logger"),
    ("torchair", "inference.cache_compile"),
    ("torchair", "inference.readable_cache"),
    ("torchair", "scope.npu_stream_switch"),
    ("torchair", "scope.limit_core_num"),
    ("torchair", "ops.npu_create_tagged_event"),
    ("torchair", "ops.npu_tagged_event_record"),
    ("torchair", "ops.npu_tagged_event_wait"),
    ("torchair", "ops.npu_record_tagged_stream"),
    ("torchair.configs.compiler_config", "CompilerConfig"),
    ("torchair.core.utils", "logger"),
    ("torchair.inference", "cache_compile"),
    ("torchair.inference", "readable_cache"),
    ("torchair.ops", "npu_create_tagged_event"),
    ("torchair.ops", "npu_tagged_event_record"),
    ("torchair.ops", "npu_tagged_event_wait"),
    ("torchair.ops", "npu_record_tagged_stream"),
    ("torchair.scope", "npu_stream_switch"),
    ("torchair.scope", "limit_core_num"),
    ("torchair.scope", "deterministic"),
)
OTHERS = (
    ("torch", "npu.npugraph_ex.compile_fx"),
    ("torch", "npu.npugraph_ex.register_replacement"),
    ("torch", "npu.npugraph_ex.inference.cache_compile"),
    ("torch", "npu.npugraph_ex.inference.readable_cache"),
    ("torch", "npu.npugraph_ex.scope.limit_core_num"),
    ("torch", "npu.npugraph_ex.scope.deterministic"),
    ("torch", "ops.air.scope_enter.default"),
    ("torch", "ops.air.scope_exit.default"),
    ("torch", "ops.air.record.default"),
    ("torch", "ops.air.wait.default"),
    ("npugraph_ex.core.utils", "logger"),
    ("npugraph_ex.configs.compiler_config", "CompilerConfig"),
)


@pytest.mark.usefixtures("as_torchair")
@pytest.mark.parametrize(("module", "path"), TORCHAIR + OTHERS, ids=lambda text: text)
def test_every_promised_path_is_there(module: str, path: str) -> None:
    """Each name of TorchAir, of `torch.npu.npugraph_ex` and of the guides is this library's own object: none was renamed."""
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    if path.startswith("ops.air"):
        assert isinstance(value, torch._ops.OpOverload)
    elif path.endswith("logger"):
        assert value is npugraph_ex.logger
    else:
        home = importlib.import_module(value.__module__)
        assert home.__name__.startswith("npugraph_ex.")
        assert getattr(home, value.__name__) is value


@pytest.mark.parametrize("home", ["torch_npu.dynamo", "torch_npu.npu"])
def test_a_module_has_one_copy_under_every_name(home: str) -> None:
    """Below torch_npu's names for its backend are this library's own modules: its operators are not registered again."""
    prefix = f"{home}.npugraph_ex."
    package = importlib.import_module(prefix[:-1])
    walked = {info.name for info in pkgutil.walk_packages(package.__path__, prefix)}
    record = importlib.import_module(f"{prefix}operators.npu_rms_norm")
    assert (record.__name__, record.__spec__.name) == ("npugraph_ex.operators.npu_rms_norm",) * 2
    assert {f"{prefix}config", record.__name__.replace("npugraph_ex.", prefix)} < walked
    loaded = [name for name in sys.modules if name.startswith(prefix)]
    assert len(loaded) > 10
    assert all(sys.modules[name] is sys.modules[name.removeprefix(f"{home}.")] for name in loaded)
    assert importlib.util.find_spec(f"{prefix}nothing") is None


# What torch's matcher takes from Inductor's: who matches patterns needs none of it; who needs it gets the real one.
_OF_INDUCTOR = ("torch._inductor.lowering", "torch._inductor.decomposition")


def test_a_compilation_imports_no_kernels_of_inductor(ask: Ask) -> None:
    """They would take more than half of the processor time of a first call. What of torch's matcher asks for them gets them."""
    code = f"""
import importlib, sys, torch, torch_npu
def loaded():
    return [name in sys.modules for name in {_OF_INDUCTOR!r}]
compiled = torch.compile(lambda x: x * 2 + 1, backend="npugraph_ex")
answer = [compiled(torch.ones(2, device="npu")).tolist(), loaded()]
import torch._inductor.pattern_matcher as matcher
traced = matcher.fwd_only(lambda x: torch.addmm(x, x, x), [torch.ones(2, 2)])
counted, patterns, add = [], matcher.PatternMatcherPass(), torch.ops.aten.addmm.default
@matcher.register_graph_pattern(matcher.CallFunction(add, *[matcher.Arg()] * 3), pass_dict=patterns)
def count(match, *_):
    counted.append(match.nodes[0].name)
patterns.apply(traced)
answer += [counted, loaded(), [importlib.import_module(name).__spec__.name for name in {_OF_INDUCTOR!r}]]
"""
    assert ask(code) == [[3.0, 3.0], [False, False], ["addmm"], [True, True], [*_OF_INDUCTOR]]


@pytest.mark.parametrize("first", _OF_INDUCTOR)
def test_inductors_modules_may_be_there_before_the_matcher(ask: Ask, first: str) -> None:
    """Whichever comes first, the matcher has functions that answer, and the modules are torch's."""
    code = f"""
import importlib, sys, torch, torch_npu
before = importlib.import_module({first!r})
import npugraph_ex.fusion
from torch._inductor import pattern_matcher
answer = [sys.modules[{first!r}] is before, type(pattern_matcher.select_decomp_table()).__name__]
"""
    assert ask(code) == [True, "dict"]
