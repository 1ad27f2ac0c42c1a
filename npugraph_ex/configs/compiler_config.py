"""`CompilerConfig` under the path by which TorchAir's users, torch_npu and vLLM-Ascend import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npugraph_ex.config.compiler_config import CompilerConfig, apply_flat

__all__ = ["CompilerConfig"]


def _process_kwargs_options(config: CompilerConfig, kwargs: Mapping[str, Any]) -> None:
    """Set the options of `kwargs["options"]`, if there are any: the call that torch_npu and vLLM-Ascend make."""
    apply_flat(config, kwargs.get("options") or {})
