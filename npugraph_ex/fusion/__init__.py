"""Operator fusion: a registry of replacement rules and the checked matcher that applies them.

README.md beside this file says what the matcher promises. ``passes.fusion`` calls ``engine``,
``registry.register_replacement`` adds a user's rule, and ``rules`` contains the built-in ones.
"""

from npugraph_ex import _torch_private

_torch_private.import_matcher()  # before the modules here import it
