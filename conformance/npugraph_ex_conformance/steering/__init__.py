"""Random examples steered by what they reach: one that reached something new is changed, and tried again.

`points` counts which way each condition of the library went; `search` keeps and changes examples; `kind` makes a
campaign's kind of it.
"""
