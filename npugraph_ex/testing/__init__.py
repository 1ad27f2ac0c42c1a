"""The public testing toolkit: random programs, the three-way oracle, the float64 judge, scripts and mutants.

Nothing in the library imports this package. Names load on first use, because `start_target` must be callable before
torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npugraph_ex.testing.corpus import CORPUS as CORPUS
    from npugraph_ex.testing.formats import ulp as ulp
    from npugraph_ex.testing.inputs import Input as Input
    from npugraph_ex.testing.inputs import make_inputs as make_inputs
    from npugraph_ex.testing.judge import Judgement as Judgement
    from npugraph_ex.testing.judge import Limits as Limits
    from npugraph_ex.testing.judge import judge_floating as judge_floating
    from npugraph_ex.testing.judge import judge_quantised as judge_quantised
    from npugraph_ex.testing.kills import kill as kill
    from npugraph_ex.testing.known_bug import KnownBug as KnownBug
    from npugraph_ex.testing.known_bug import shows as shows
    from npugraph_ex.testing.localise import find_guilty as find_guilty
    from npugraph_ex.testing.metadata import Observation as Observation
    from npugraph_ex.testing.metadata import observe as observe
    from npugraph_ex.testing.metadata import visible_difference as visible_difference
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
    from npugraph_ex.testing.search import find_failure as find_failure
    from npugraph_ex.testing.shrinking import shrink as shrink
    from npugraph_ex.testing.strategies import exact_programs as exact_programs
    from npugraph_ex.testing.strategies import integer_programs as integer_programs
    from npugraph_ex.testing.strategies import planted_programs as planted_programs
    from npugraph_ex.testing.strategies import programs as programs
    from npugraph_ex.testing.strategies import sample as sample
    from npugraph_ex.testing.stream_builder import StreamBuilder as StreamBuilder
    from npugraph_ex.testing.stream_programs import StreamProgram as StreamProgram
    from npugraph_ex.testing.stream_programs import stream_corpus as stream_corpus
    from npugraph_ex.testing.stream_strategies import stream_graphs as stream_graphs
    from npugraph_ex.testing.targets import Target as Target
    from npugraph_ex.testing.targets import TargetError as TargetError
    from npugraph_ex.testing.targets import start_target as start_target
    from npugraph_ex.testing.validation import Finding as Finding
    from npugraph_ex.testing.validation import ReplacementRefutedError as ReplacementRefutedError
    from npugraph_ex.testing.validation import RulesNotFoundError as RulesNotFoundError
    from npugraph_ex.testing.validation import Validation as Validation
    from npugraph_ex.testing.validation import load_rules as load_rules
    from npugraph_ex.testing.validation import validate_module as validate_module
    from npugraph_ex.testing.validation import validate_replacement as validate_replacement

_HOME_OF = {
    "CORPUS": "corpus",
    "Case": "oracle",
    "Finding": "validation",
    "Input": "inputs",
    "Judgement": "judge",
    "KnownBug": "known_bug",
    "Limits": "judge",
    "Observation": "metadata",
    "Outcome": "oracle",
    "Pattern": "patterns",
    "Program": "program",
    "ReplacementRefutedError": "validation",
    "RulesNotFoundError": "validation",
    "StreamBuilder": "stream_builder",
    "StreamProgram": "stream_programs",
    "stream_corpus": "stream_programs",
    "stream_graphs": "stream_strategies",
    "Target": "targets",
    "TargetError": "targets",
    "Validation": "validation",
    "check": "oracle",
    "exact_programs": "strategies",
    "find_failure": "search",
    "find_guilty": "localise",
    "integer_programs": "strategies",
    "judge_floating": "judge",
    "judge_quantised": "judge",
    "kill": "kills",
    "load_rules": "validation",
    "make_inputs": "inputs",
    "mutant": "mutation",
    "mutants": "mutation",
    "observe": "metadata",
    "planted_programs": "strategies",
    "programs": "strategies",
    "registered_patterns": "patterns",
    "reproduce": "script",
    "sample": "strategies",
    "script_of": "script",
    "shows": "known_bug",
    "shrink": "shrinking",
    "start_target": "targets",
    "ulp": "formats",
    "validate_module": "validation",
    "validate_replacement": "validation",
    "visible_difference": "metadata",
}

__all__ = [
    "CORPUS",
    "Case",
    "Finding",
    "Input",
    "Judgement",
    "KnownBug",
    "Limits",
    "Observation",
    "Outcome",
    "Pattern",
    "Program",
    "ReplacementRefutedError",
    "RulesNotFoundError",
    "StreamBuilder",
    "StreamProgram",
    "Target",
    "TargetError",
    "Validation",
    "check",
    "exact_programs",
    "find_failure",
    "find_guilty",
    "integer_programs",
    "judge_floating",
    "judge_quantised",
    "kill",
    "load_rules",
    "make_inputs",
    "mutant",
    "mutants",
    "observe",
    "planted_programs",
    "programs",
    "registered_patterns",
    "reproduce",
    "sample",
    "script_of",
    "shows",
    "shrink",
    "start_target",
    "stream_corpus",
    "stream_graphs",
    "ulp",
    "validate_module",
    "validate_replacement",
    "visible_difference",
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
