"""`from npugraph_ex.core.utils import logger`, as the guides write it."""

from npugraph_ex.observe.logger import logger

__all__ = ["logger"]
