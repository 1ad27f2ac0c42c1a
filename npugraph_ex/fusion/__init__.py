"""Operator fusion: a registry of replacement rules and the checked matcher that applies them.

What the matcher promises is in README.md beside this file. ``engine.run`` is the pass,
``registry.register_replacement`` is how a user adds a rule, ``rules`` holds the default ones.
"""
