"""npugraph_ex: a torch.compile backend for Ascend NPUs whose rewrites are checked.

This file is a façade. The public names, listed in `__init__.pyi`, load on first use, so that `import npugraph_ex` costs
nothing and does not import torch. Nothing else belongs here.

PYTEST_DONT_REWRITE: this package may be there before pytest, which would warn that it cannot rewrite it.
"""

from __future__ import annotations

import npugraph_ex_autoload
from npugraph_ex._facade import PublicNames

# An uninstalled checkout has no entry points and autoloading can be switched off; then this is what settles the name.
npugraph_ex_autoload.claim()

__npu_emulator_hides__ = True
"""This package runs other people's models: the emulated device names their lines and not ours (npu_emulator/frames.py)."""

_names = PublicNames(__name__, __file__)
__all__ = _names.exported  # noqa: PLE0605 - a list
__getattr__ = _names.load
__dir__ = _names.listed
