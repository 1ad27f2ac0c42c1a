"""vLLM and vLLM-Ascend: their configuration, and a compiler object that vLLM takes as it is.

`config` reads what users write under `additional_config`; `compiler.NpuGraphExCompiler` is what vLLM calls.
"""

from npugraph_ex.integrations.vllm.config import VllmSettings as VllmSettings

__all__ = ["VllmSettings"]
