"""The public testing toolkit: random programs, the three-way oracle, the float64 judge, scripts and mutants.

Nothing in the library imports this package. Its names, listed in `__init__.pyi`, load on first use, because
`start_target` must be callable before torch is imported.
"""

from __future__ import annotations

from npugraph_ex._facade import PublicNames

_names = PublicNames(__name__, __file__)
__all__ = _names.exported  # noqa: PLE0605 - a list
__getattr__ = _names.load
__dir__ = _names.listed
