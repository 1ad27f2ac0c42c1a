"""Tensors with a tangent, of `torch.autograd.forward_ad`, as inputs of a function that Dynamo traces."""

from __future__ import annotations

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.14 traces no function of dual tensors, and runs it as in eager mode; before, it dropped their tangents.",
    since=(2, 14),
    test="tests/frontend/test_forward_derivatives.py",
)
