"""`from torchair.core.utils import logger`."""

from npugraph_ex.observe.logger import logger

__all__ = ["logger"]
