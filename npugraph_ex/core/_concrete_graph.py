"""`ValuePack` where vLLM-Ascend looks for it; re-exports and nothing else."""

from npugraph_ex.integrations.value_packs import ValuePack
from npugraph_ex.integrations.value_packs import is_symlist as _is_symlist

__all__ = ["ValuePack", "_is_symlist"]
