"""Lifting: finds fused npu operators in programs that spell them out in ATen operators.

``README.md`` beside this file says what is promised. ``engine.lift`` is the door. ``forms`` holds one form a module: it reads a
subgraph in normal form, however it is spelled, and proposes an operator. ``judging`` decides whether a proposal is admitted.
"""
