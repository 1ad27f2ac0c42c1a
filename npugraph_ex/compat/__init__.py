"""Import paths of older scripts, as thin re-exports.

`use_as_torchair()` is the explicit opt-in by which scripts that say `import torchair` run on this library unchanged.
"""

from __future__ import annotations

import sys
from importlib import import_module

from npugraph_ex.compat.torchair_names import AbsentModules
from npugraph_ex.errors import NameRuleError

__all__ = ["use_as_torchair"]


def use_as_torchair() -> None:
    """Make `import torchair` mean this library, in this process, from now on.

    docs/reference/torchair.md has the names that it then has. The error of another name says what there is instead.

    Raises:
        NameRuleError: TorchAir itself is already loaded; its modules would mix with these.
    """
    ours = import_module("npugraph_ex.compat.torchair")
    if sys.modules.get("torchair") is ours:
        return
    loaded = sorted(name for name in sys.modules if name.startswith("torchair."))
    if loaded:
        raise NameRuleError(
            f"torchair itself is already loaded ({loaded[0]}); call npugraph_ex.compat.use_as_torchair() before "
            "the first `import torchair`, or start the script with `npugraph-ex run --as-torchair`",
        )
    # torch_npu keeps a name that is already taken; a stand-in of its own that nobody has used yet is replaced.
    sys.modules["torchair"] = ours
    for name in ("inference", "ops", "scope"):  # `import torchair.ops` and `torchair.ops` are one module
        sys.modules[f"torchair.{name}"] = import_module(f"{ours.__name__}.{name}")
    sys.meta_path.append(AbsentModules(ours))  # the last one, because it answers for what no other finder has
