"""The public testing toolkit: random programs, the three-way oracle, the float64 judge, scripts and mutants.

Nothing in the library imports this package. Names load on first use, because `start_target` must be callable before
torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugraph_ex.testing.formats import ulp as ulp
    from npugraph_ex.testing.inputs import Input as Input
    from npugraph_ex.testing.inputs import make_inputs as make_inputs
    from npugraph_ex.testing.judge import Judgement as Judgement
    from npugraph_ex.testing.judge import Limits as Limits
    from npugraph_ex.testing.judge import judge_floating as judge_floating
    from npugraph_ex.testing.judge import judge_quantised as judge_quantised
    from npugraph_ex.testing.localise import find_guilty as find_guilty
    from npugraph_ex.testing.mutation import mutant as mutant
    from npugraph_ex.testing.mutation import mutants as mutants
    from npugraph_ex.testing.oracle import Case as Case
    from npugraph_ex.testing.oracle import Outcome as Outcome
    from npugraph_ex.testing.oracle import check as check
    from npugraph_ex.testing.patterns import Pattern as Pattern
    from npugraph_ex.testing.patterns import registered_patterns as registered_patterns
    from npugraph_ex.testing.program import Program as Program
    from npugraph_ex.testing.script import reproduce as reproduce
    from npugraph_ex.testing.script import script_of as script_of
    from npugraph_ex.testing.strategies import integer_programs as integer_programs
    from npugraph_ex.testing.strategies import programs as programs
    from npugraph_ex.testing.targets import Target as Target
    from npugraph_ex.testing.targets import TargetError as TargetError
    from npugraph_ex.testing.targets import start_target as start_target

_HOME_OF = {
    "Case": "oracle",
    "Input": "inputs",
    "Judgement": "judge",
    "Limits": "judge",
    "Outcome": "oracle",
    "Pattern": "patterns",
    "Program": "program",
    "Target": "targets",
    "TargetError": "targets",
    "check": "oracle",
    "find_guilty": "localise",
    "integer_programs": "strategies",
    "judge_floating": "judge",
    "judge_quantised": "judge",
    "make_inputs": "inputs",
    "mutant": "mutation",
    "mutants": "mutation",
    "programs": "strategies",
    "registered_patterns": "patterns",
    "reproduce": "script",
    "script_of": "script",
    "start_target": "targets",
    "ulp": "formats",
}

__all__ = [
    "Case",
    "Input",
    "Judgement",
    "Limits",
    "Outcome",
    "Pattern",
    "Program",
    "Target",
    "TargetError",
    "check",
    "find_guilty",
    "integer_programs",
    "judge_floating",
    "judge_quantised",
    "make_inputs",
    "mutant",
    "mutants",
    "programs",
    "registered_patterns",
    "reproduce",
    "script_of",
    "start_target",
    "ulp",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it, once."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *_HOME_OF})
