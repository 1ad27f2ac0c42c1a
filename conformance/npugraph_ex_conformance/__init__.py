"""The conformance suite: its tests, examples, corpora of known faults, mutants and reports; `npugraph-ex conformance` runs it."""
