"""The conformance suite: its tests, examples, corpora of known faults, mutants and reports; `npugraph-ex conformance` runs it.

PYTEST_DONT_REWRITE: the commands import this package, and one of them may start pytest, which would warn that it is too late.
"""
