"""`from torchair.scope import limit_core_num`, as TorchAir's guides write it; re-exports and nothing else."""

from npugraph_ex.compat.torchair_names import getattr_of
from npugraph_ex.scope import deterministic, limit_core_num, npu_stream_switch

__all__ = ["deterministic", "limit_core_num", "npu_stream_switch"]
__getattr__ = getattr_of("scope", __all__)
