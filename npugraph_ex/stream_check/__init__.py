"""The happens-before analysis of streams: accesses to memory, the order that events prove, and what is missing.

`analysis.analyse` takes a graph and returns findings; it edits nothing. `repair_hints` writes the line that repairs a
finding, in the API that the program uses.
"""
