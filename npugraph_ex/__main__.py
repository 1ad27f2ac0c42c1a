"""`python -m npugraph_ex`: the command `npugraph-ex` of this interpreter, where scripts of others come first on PATH."""

import sys

from npugraph_ex.cli import main

if __name__ == "__main__":
    sys.exit(main())
