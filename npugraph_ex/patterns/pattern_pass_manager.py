"""`register_replacement` where torch_npu looks for it."""

from npugraph_ex.fusion.registry import register_replacement

__all__ = ["register_replacement"]
