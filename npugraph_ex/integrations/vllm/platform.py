"""vLLM-Ascend's platform with this library's compiler object, so that models in pieces are compiled by this library too.

vLLM-Ascend switches this library off where the captured graphs are pieces (``PIECEWISE``, ``FULL_AND_PIECEWISE``): a graph
for each piece would mean a compilation for each. The compiler object makes one compilation serve equal pieces.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend.platform import NPUPlatform

from npugraph_ex.integrations.vllm.config import NEWER, VllmSettings

__all__ = ["NpuGraphExPlatform"]


class NpuGraphExPlatform(NPUPlatform):  # type: ignore[misc] # a class of the client's
    """vLLM takes it where ``VLLM_PLUGINS`` names ``npugraph_ex`` and not ``ascend``."""

    @classmethod
    def get_compile_backend(cls) -> str:
        """Return the full name of the compiler object."""
        return "npugraph_ex.integrations.vllm.compiler.NpuGraphExCompiler"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Let the client settle the configuration, and keep what the user asked of this library in a mode with pieces."""
        asked = VllmSettings.of(vllm_config.additional_config).enable
        super().check_and_update_config(vllm_config)
        if vllm_config.compilation_config.cudagraph_mode.requires_piecewise_compilation():
            vllm_config.additional_config[NEWER]["enable_npugraph_ex"] = asked
