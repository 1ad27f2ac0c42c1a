"""`from torchair.configs.compiler_config import CompilerConfig`."""

from npugraph_ex.config.compiler_config import CompilerConfig

__all__ = ["CompilerConfig"]
