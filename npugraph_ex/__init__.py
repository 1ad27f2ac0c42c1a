"""npugraph_ex: a torch.compile backend for Ascend NPUs whose rewrites are checked.

This file is a façade. Public names load on first use, so that `import npugraph_ex` costs nothing and does not import
torch. Nothing else belongs here.

PYTEST_DONT_REWRITE: this package may be there before pytest, which would warn that it cannot rewrite it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import npugraph_ex_autoload
from npugraph_ex._version import __version__ as __version__

if TYPE_CHECKING:
    from npugraph_ex.aclgraph.host_arguments import register_host_arguments as register_host_arguments
    from npugraph_ex.cache.key import cache_key as cache_key
    from npugraph_ex.config.compiler_config import CompilerConfig as CompilerConfig
    from npugraph_ex.frontend.entry.backend import compile_fx as compile_fx
    from npugraph_ex.frontend.entry.backend import get_compiler as get_compiler
    from npugraph_ex.frontend.entry.backend import get_npu_backend as get_npu_backend
    from npugraph_ex.frontend.entry.explain import explain as explain
    from npugraph_ex.fusion.conditions import ShapeRange as ShapeRange
    from npugraph_ex.fusion.registry import register_replacement as register_replacement
    from npugraph_ex.observe.logger import logger as logger
    from npugraph_ex.report.passes import last_report as last_report

__npu_emulator_hides__ = True
"""This package runs other people's models: the emulated device names their lines and not ours (npu_emulator/frames.py)."""

_HOME_OF = {
    "CompilerConfig": "npugraph_ex.config.compiler_config",
    "ShapeRange": "npugraph_ex.fusion.conditions",
    "cache_key": "npugraph_ex.cache.key",
    "compile_fx": "npugraph_ex.frontend.entry.backend",
    "get_compiler": "npugraph_ex.frontend.entry.backend",
    "get_npu_backend": "npugraph_ex.frontend.entry.backend",
    "explain": "npugraph_ex.frontend.entry.explain",
    "invalidate": "npugraph_ex.aclgraph.compiled",
    "last_report": "npugraph_ex.report.passes",
    "logger": "npugraph_ex.observe.logger",
    "register_host_arguments": "npugraph_ex.aclgraph.host_arguments",
    "register_replacement": "npugraph_ex.fusion.registry",
}

# Submodules reachable as attributes after a bare `import npugraph_ex`.
_SUBMODULES = frozenset(
    {
        "cache",
        "compat",
        "config",
        "configs",
        "core",
        "errors",
        "inference",
        "integrations",
        "npu_fx_compiler",
        "observe",
        "ops",
        "patterns",
        "scope",
    }
)

# An uninstalled checkout has no entry points and autoloading can be switched off; then this is what settles the name.
npugraph_ex_autoload.claim()

__all__ = [
    "CompilerConfig",
    "ShapeRange",
    "__version__",
    "cache_key",
    "compile_fx",
    "explain",
    "get_compiler",
    "get_npu_backend",
    "invalidate",
    "last_report",
    "logger",
    "ops",
    "register_host_arguments",
    "register_replacement",
    "scope",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it, once."""
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *_HOME_OF, *_SUBMODULES})
