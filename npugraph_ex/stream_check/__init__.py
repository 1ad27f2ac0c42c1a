"""The happens-before analysis of streams: accesses to memory, the order that events prove, and what is missing.

`analysis.analyse` is the door; it takes a graph and returns findings, and edits nothing. `repair_hints` words the line that
mends a finding in the API that the program uses.
"""
