"""The import path by which `torch.npu.npugraph_ex.register_replacement` reaches this library; re-exports only."""

from npugraph_ex.patterns import pattern_pass_manager

__all__ = ["pattern_pass_manager"]
