"""Every option, in one table (`options.py`) with one validator (`option.py`) and two faces.

`Options` is the frozen value that the compiler reads; `CompilerConfig` is the object that scripts written for TorchAir
fill in. Both know an option by its flat name.
"""

from npugraph_ex.config.compiler_config import CompilerConfig as CompilerConfig
from npugraph_ex.config.option import Option as Option
from npugraph_ex.config.options import OPTION_TABLE as OPTION_TABLE
from npugraph_ex.config.options import Options as Options

__all__ = ["OPTION_TABLE", "CompilerConfig", "Option", "Options"]
