"""Lets the tests of this folder import their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest's importlib mode puts nothing on the path.
sys.path.append(str(Path(__file__).parent.parent))
