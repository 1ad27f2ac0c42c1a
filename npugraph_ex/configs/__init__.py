"""An import path of other libraries' (`from npugraph_ex.configs import compiler_config`); re-exports only."""
