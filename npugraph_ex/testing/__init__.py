"""The public testing toolkit: random programs, the three-way oracle, the float64 judge, scripts and mutants.

Nothing in the library imports this package. Its names, listed in `__init__.pyi`, load on first use, because
`start_target` must be callable before torch is imported. Mutants and corpora are the suite's, under this name for users.
"""

from __future__ import annotations

from npugraph_ex._facade import PublicNames

_names = PublicNames(__name__, __file__)
__all__ = _names.exported  # noqa: PLE0605 - a list
__dir__ = _names.listed


def __getattr__(name: str) -> object:
    """Load a public name; where it draws programs and hypothesis is not installed, say how to install it."""
    try:
        return _names.load(name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        from npugraph_ex.observe.installing import install_command

        needs = f"npugraph_ex.testing.{name} draws programs with hypothesis, which is not installed"
        raise ModuleNotFoundError(f"{needs}: {install_command('conformance')}", name=error.name) from error
