"""Lets the tests of this folder import ``fx_helpers``, which the folders on FX graphs share, and helpers of their own."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest's importlib mode puts nothing on the path.
sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent))
