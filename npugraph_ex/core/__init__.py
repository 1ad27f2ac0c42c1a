"""An import path of other libraries' (`from npugraph_ex.core.utils import logger`); re-exports and nothing else."""
