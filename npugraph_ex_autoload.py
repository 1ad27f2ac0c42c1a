"""The name rule: whatever is imported in whatever order, `npugraph_ex` means this library.

torch_npu carries a backend of the same name. While it is imported it puts a stand-in for that backend into
`sys.modules["npugraph_ex"]`, and when dynamo is first imported it does so again and registers the backend string.
This module waits for `torch_npu.dynamo` and, once that has run, answers both questions with this library instead.

It is reached in three ways, each of which may be absent: at interpreter start (`npugraph_ex_autoload.pth`, the only
one that helps where `import torch_npu` comes first), inside `import torch` (entry point group `torch.backends`), and
from `import npugraph_ex` itself. All of them end in `install`, which may be called any number of times.

The environment variable NPUGRAPH_EX=bundled switches all of it off. Kept tiny on purpose, because it runs in programs
that never compile anything: until torch_npu is there it imports nothing but `os` and `sys`.

No import fails by it, strict warnings or not. A failure of its own leaves the name with torch_npu and is one line in the
log; where dynamo alone cannot be prepared, the line is logged at the first compilation with this backend.

PYTEST_DONT_REWRITE: this module is there before pytest, which would warn that it cannot rewrite it.
"""

from __future__ import annotations

import os
import sys

# Not from typing: importing that would cost every interpreter start more than all the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

NAME = "npugraph_ex"
SWITCH = "NPUGRAPH_EX"
__npu_emulator_starts__ = True
_PACKAGE = "torch_npu"
"""It prints while it is imported that there is no CANN, which an emulated child need not say; see npu_emulator."""
_HOST = "torch_npu.dynamo"
_DEVICES = "torch_npu.npu"
_SEARCHING = "torch_npu.utils.collect_env"
"""It searches the working folder while it is imported, which an emulated child need not wait for; see npu_emulator."""
_ABSENT: Any = object()

failures: dict[str, str] = {}
"""What this module could not do, with the reason: take its "part" in the process, prepare "dynamo"; or that the "pair" was
not tested. `npugraph-ex env` asks."""


def bundled_is_chosen() -> bool:
    """Tell whether the environment asks for torch_npu's own backend under this name."""
    return os.environ.get(SWITCH) == "bundled"


def install() -> None:
    """Make the name mean this library, now if torch_npu is already there and otherwise as soon as it is."""
    if bundled_is_chosen() or "part" in failures:
        return
    host = sys.modules.get(_HOST)
    if host is None:
        if not any(isinstance(finder, _HostWatcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _HostWatcher())
    # A host that is still executing has no such function yet; the watcher that saw it start settles it at its end.
    elif "_get_npugraph_ex_backend" in getattr(host, "__dict__", {}):
        _settle(host)


def claim() -> None:
    """Called once by this library's own `__init__`: take the name, or hand it over where the environment says so."""
    choice = os.environ.get(SWITCH, "")
    if choice == "bundled":
        _hand_over()
    elif choice in {"", "library"}:
        install()
    else:
        from npugraph_ex.errors import NameRuleError

        msg = (
            f"{SWITCH} is {choice!r}; it takes 'bundled' (torch_npu's own backend) or 'library' (this one, the default)"
        )
        raise NameRuleError(msg)


def autoload() -> None:
    """Entry point of the group `torch.backends`: torch calls it at the end of `import torch`."""
    install()


def resume_emulation() -> None:
    """Entry point of the same group: go on with the emulation of the parent process, and import nothing where there is none."""
    if os.environ.get("NPU_EMULATOR") == "1":
        from npu_emulator.activation import resume_in_child

        resume_in_child()


def backend(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
    """Compile one Dynamo graph: what the string in `torch.compile(backend="npugraph_ex")` stands for.

    The library's own backend is imported at the first compilation and not before.
    """
    if bundled_is_chosen():
        # Dynamo met this entry point before torch_npu's own of the same name.
        from torch_npu.dynamo import _npugraph_ex_backend_entrypoint

        return _npugraph_ex_backend_entrypoint(gm, example_inputs, **kwargs)
    untaught = failures.pop("dynamo", None)
    if untaught is not None:
        _log(
            f"dynamo could not be prepared for npugraph-ex ({untaught}); `npugraph-ex env` names the versions it is for"
        )
    try:
        from npugraph_ex.frontend.entry.backend import npugraph_ex
    except Exception as error:  # what moved in torch shows as an ImportError, an AttributeError or worse
        msg = (
            f"npugraph-ex cannot be loaded beside the installed torch and torch_npu ({_one_line(error)}); `npugraph-ex env` "
            f"names the versions it is for, and {SWITCH}=bundled gives torch_npu's own backend"
        )
        raise ImportError(msg) from error

    return npugraph_ex(gm, example_inputs, **kwargs)


def vllm_platform() -> str | None:
    """Entry point of the group `vllm.platform_plugins`: vLLM-Ascend's platform with this library's compiler, where it is chosen."""
    plugins = os.environ.get("VLLM_PLUGINS", "").split(",")
    if bundled_is_chosen() or NAME not in plugins or "ascend" in plugins:
        return None
    return "npugraph_ex.integrations.vllm.platform.NpuGraphExPlatform"


def command_line() -> int:
    """Run `npugraph-ex`, whose code is this library's own even where NPUGRAPH_EX=bundled gives the name away."""
    choice = os.environ.pop(SWITCH, None)
    try:
        from npugraph_ex.cli import main
    except KeyboardInterrupt:  # its imports take a while
        sys.stderr.write("npugraph-ex: stopped by Ctrl-C\n")
        return 130
    return main(choice=choice)


def __getattr__(name: str) -> Mapping[str, object]:
    """Give `KERNELS`, the entry point of the group `npu_emulator.kernels`; torch is imported only when asked for it."""
    if name != "KERNELS":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return _kernels()


def _kernels() -> Mapping[str, object]:
    """Load what each npu operator computes, even while `npugraph_ex` is torch_npu's backend.

    Under NPUGRAPH_EX=bundled a bare package lends the name to `npugraph_ex.operators` (which needs torch and nothing
    else of this library) for as long as its import takes.
    """
    from importlib import import_module

    lent: dict[str, ModuleType] = {}
    if bundled_is_chosen():
        from importlib.machinery import ModuleSpec
        from importlib.util import module_from_spec

        import_module("torch")  # brings torch_npu, which must find the name free
        lent = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours_by_name(name)}
        spec = ModuleSpec(NAME, None, is_package=True)
        spec.submodule_search_locations = [os.path.dirname(_facade_file())]
        sys.modules[NAME] = module_from_spec(spec)
    install()  # torch may call this entry point before ours, and without the .pth nothing watched torch_npu
    try:
        records: Mapping[str, object] = import_module(f"{NAME}.operators").OPERATORS
    finally:
        if bundled_is_chosen():
            for name in [name for name in sys.modules if _is_ours_by_name(name)]:
                del sys.modules[name]
            sys.modules.update(lent)
    return records


class _HostWatcher:
    """A meta-path finder that finds nothing itself: it runs `_settle` when `torch_npu.dynamo` has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the host module and append to its execution."""
        emulated = os.environ.get("NPU_EMULATOR") == "1"
        if fullname == _SEARCHING and emulated:
            from npu_emulator.working_folder import leave_unsearched

            leave_unsearched()
        if fullname != _HOST and not (fullname == _PACKAGE and emulated):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None or finder is self else find(fullname, path, target)
            if spec is not None:
                if fullname == _HOST:
                    _append_settling(spec.loader, self)
                else:
                    from npu_emulator.warnings_filter import keep_cann_warnings_from

                    keep_cann_warnings_from(spec.loader)
                return spec
        return None


class _OneCopy:
    """Finds and loads `torch_npu.dynamo.npugraph_ex.x`, where this library stands, as the module `npugraph_ex.x`.

    Without it the façade's search path would give a second copy of each module, which registers its operators again.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Describe the alias of a module that is there; the module itself is imported by `exec_module`."""
        del path, target
        name = _own_name(fullname)
        if not name:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        return ModuleSpec(fullname, self) if find_spec(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create an empty module, which the next step replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Import this library's module and put it under the alias; a module may replace itself in `sys.modules`."""
        from importlib import import_module

        sys.modules[module.__name__] = import_module(_own_name(module.__name__))


def _own_name(fullname: str) -> str:
    """`npugraph_ex.x` of the name of a module below one of torch_npu's two names for its backend; empty of any other."""
    for home in (_HOST, _DEVICES):
        if fullname.startswith(f"{home}.{NAME}."):
            return fullname[len(home) + 1 :]
    return ""


def _append_settling(loader: Any, watcher: _HostWatcher) -> None:
    """Make this one loader settle the name after it has executed its module; its class and type stay as they are."""

    def execute_and_settle(module: ModuleType) -> None:
        execute(module)
        # A loader may serve several modules, and one that failed is imported again.
        if module.__name__ == _HOST:
            if watcher in sys.meta_path:
                sys.meta_path.remove(watcher)
            if not bundled_is_chosen():
                _settle(module)

    try:
        execute = loader.exec_module
        loader.exec_module = execute_and_settle
    except Exception as error:  # noqa: BLE001 - a loader of any kind, and no import may fail by the hook
        _stand_aside(error)


def _settle(host: ModuleType) -> None:
    """Answer torch_npu's two questions (which module, which backend) with this library; all of it or nothing."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        _take_over(host, before)
    except Exception as error:  # noqa: BLE001 - whatever moved in torch or torch_npu, their import must not fail by it
        for names, name, value in reversed(before):
            names.pop(name, None)
            if value is not _ABSENT:
                names[name] = value
        _stand_aside(error)
    else:
        _say_if_untested()


def _say_if_untested() -> None:
    """Log once in a process that the tests did not run on the installed torch and torch_npu."""
    try:
        from npugraph_ex.versions.pairs import untested_here

        text = untested_here()
    except Exception:  # noqa: BLE001 - no import fails by the hook, whatever somebody's metadata holds
        text = ""
    if text and "pair" not in failures:
        failures["pair"] = text
        _log(f"{text}; `npugraph-ex env` says more")


def _take_over(host: ModuleType, before: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Put this library in every place; `before` collects what stood there, as names, name and value."""

    def put(names: dict[str, Any], name: str, value: Any) -> None:
        before.append((names, name, names.get(name, _ABSENT)))
        names[name] = value

    if vars(host).get("_npugraph_ex_backend_entrypoint") is backend:
        return
    if any(name.startswith(f"{NAME}.") and _is_under(host, module) for name, module in list(sys.modules.items())):
        # The bundled one is already loaded and perhaps in use; two halves would be worse than the wrong whole.
        return
    before.append((sys.modules, NAME, sys.modules.get(NAME, _ABSENT)))
    facade = _facade(host)
    if vars(host).get("_npugraph_ex_backend_entrypoint") is backend:
        return  # the façade's own import ends in `claim`, which has done the rest
    if "part" in failures:
        raise ImportError(failures["part"])  # or has failed
    # `torch.npu.npugraph_ex.scope` asks for the bundled package by its full path.
    put(sys.modules, f"{_HOST}.{NAME}", facade)
    # And `torch.npu.npugraph_ex` is a module of torch_npu's own that forwards some names; this library takes its place.
    devices = sys.modules.get(_DEVICES)
    if devices is not None:
        # Older releases have loaded that one's parts, which would answer for this library's.
        parts = [name for name in sys.modules if name.startswith(f"{_DEVICES}.{NAME}.")]
        before.extend((sys.modules, name, sys.modules.pop(name)) for name in parts)
        put(sys.modules, f"{_DEVICES}.{NAME}", facade)
        put(vars(devices), NAME, facade)
    put(vars(host), NAME, facade)
    put(vars(host), "_npugraph_ex_backend_entrypoint", backend)
    put(vars(host), "_get_npugraph_ex_backend", _offer_backend)
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None and NAME in registry._COMPILER_FNS:  # noqa: SLF001 - dynamo offers no way to replace a backend
        before.append((registry._COMPILER_FNS, NAME, registry._COMPILER_FNS[NAME]))  # noqa: SLF001 - as above
        _withdraw_backend()
        registry.register_backend(backend, NAME)
        _teach_dynamo()
    sys.meta_path.insert(0, _OneCopy())


def _stand_aside(error: Exception) -> None:
    """Say in one line, and once, that the name stays with torch_npu, and why."""
    if "part" not in failures:
        failures["part"] = _one_line(error)
        _log(f"npugraph-ex takes no part in this process ({_one_line(error)}); the name {NAME} stays with torch_npu")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def _log(text: str) -> None:
    # Not a warning: a filter may turn that into an error, and then somebody else's import would fail.
    import logging

    logging.getLogger(NAME).warning("%s", text)


def _hand_over() -> None:
    """Leave `sys.modules["npugraph_ex"]` to torch_npu's backend; the running `import npugraph_ex` then returns that."""
    from npugraph_ex.errors import NameRuleError

    for name in [name for name in sys.modules if _is_ours_by_name(name)]:
        del sys.modules[name]
    try:
        import torch_npu  # noqa: F401 - puts its stand-in under the name
    except (ImportError, OSError, RuntimeError) as error:
        msg = f"{SWITCH}=bundled asks for torch_npu's backend, and torch_npu cannot be imported; see `npugraph-ex env`"
        raise NameRuleError(msg) from error
    if NAME not in sys.modules:
        msg = f"{SWITCH} became 'bundled' after torch_npu was imported; set it before Python starts"
        raise NameRuleError(msg)


def _facade(host: ModuleType) -> ModuleType:
    """Put this library's façade in the place of torch_npu's stand-in."""
    present = sys.modules.get(NAME)
    # A stand-in has no file. What has one, outside torch_npu, is this library: perhaps a second copy of it, from a
    # checkout that comes first on the path, and perhaps in the middle of its own import.
    if present is not None and vars(present).get("__file__") and not _is_under(host, present):
        return present
    sys.modules.pop(NAME, None)
    import npugraph_ex

    return npugraph_ex


def _offer_backend() -> Any:
    """Give torch_npu the callable that it is about to register under the name, and make room for it.

    torch_npu asks when it sets dynamo up, so nothing was traced yet.
    """
    _withdraw_backend()
    _teach_dynamo()
    return backend


def _teach_dynamo() -> None:
    """Let dynamo trace what torch_npu does not teach it, and right; a compilation would be too late, it follows the tracing.

    This runs while torch or torch_npu is imported, for programs that may never ask for this backend.
    """
    try:
        # Not from the package: this may run while the package is being imported, which imports dynamo.
        from npugraph_ex._torch_private.streams import trace_as_constant_call
        from npugraph_ex._torch_private.traced_metadata import keep_metadata_current
        from npugraph_ex.frontend.upstream_repairs.untold_gradients import tell

        keep_metadata_current()
        tell()
        trace_as_constant_call("npu", "default_stream")
    except Exception as error:  # noqa: BLE001 - whatever moved in torch
        failures["dynamo"] = _one_line(error)


def _withdraw_backend() -> None:
    """Drop a registration of the name: dynamo's `register_backend` takes a second one for a mistake.

    `_BACKENDS` stays: it may hold torch_npu's entry point in the middle of its loading, whose result dynamo registers
    itself (and that result is `backend`, see `_settle`).
    """
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._COMPILER_FNS.pop(NAME, None)  # noqa: SLF001 - as in _settle


def _is_ours_by_name(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _facade_file() -> str:
    return os.path.join(os.path.dirname(__file__), NAME, "__init__.py")


def _is_under(host: ModuleType, module: object) -> bool:
    """Tell whether a loaded module's file lies in the host's folder."""
    folder = os.path.dirname(host.__file__ or "?")
    file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
    return isinstance(file, str) and file.startswith(folder)
