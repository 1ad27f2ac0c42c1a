"""Parts of a graph that equal a fused operator, found from the operators' records alone: `npugraph-ex advise --discover`.

`search` finds them, `sizes` says at which other sizes they still are one, and `rules` writes them as a module of fusion rules.
"""
