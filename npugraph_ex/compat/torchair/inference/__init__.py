"""`torchair.inference.cache_compile` and `readable_cache`, as TorchAir's guides write them; re-exports and nothing else."""

from npugraph_ex.compat.torchair_names import getattr_of
from npugraph_ex.inference import cache_compile, readable_cache

__all__ = ["cache_compile", "readable_cache"]
__getattr__ = getattr_of("inference", __all__)
