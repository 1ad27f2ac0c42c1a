"""Lets the tests of this folder import ``device_helpers``, which the folders on compiled programs share, and their own."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest's importlib mode puts nothing on the path.
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
