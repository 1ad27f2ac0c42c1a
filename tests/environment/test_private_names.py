"""The canary: private names of torch and torch_npu that the source uses, and which of them a release lacks."""

from __future__ import annotations

import ast

import pytest

from npugraph_ex.observe import private_names

SOURCE = """
import torch
import torch._dynamo as dynamo
import torch.fx
from torch._guards import TracingContext as Context, tracing
from torch import _C
from torch.nn import Module

def function(node, overload):
    overload._schema  # of an object: nobody can tell which class's
    Module()._buffers
    _C._storage_Use_Count(torch._C.DispatchKey.CPU)
    return Context.try_get(), torch.fx.Node, dynamo.config.patch, torch.nn.Module.__init__

def lazy():
    from torch._dynamo import guards
    return lambda: guards.strip

def another(tracing):
    guards = tracing.guards
    return guards.check, [guards.check for dynamo in guards]
"""


def test_names_are_read_from_imports_and_attributes() -> None:
    """Under every name that a module or a function gives them; public ones and attributes of objects are left out."""
    found = set(private_names._names(ast.parse(SOURCE)))
    assert found == {
        "torch._dynamo",
        "torch._guards.TracingContext",
        "torch._guards.tracing",
        "torch._C",
        "torch._C._storage_Use_Count",
        "torch._C.DispatchKey.CPU",
        "torch._guards.TracingContext.try_get",
        "torch._dynamo.config.patch",
        "torch._dynamo.guards",
        "torch._dynamo.guards.strip",
    }


@pytest.mark.slow
def test_the_installed_release_has_every_name() -> None:
    """Some hundred names, each with the files that a new release would break."""
    names = private_names.used()
    assert len(names) > 100
    assert "npugraph_ex/_torch_private/aot.py" in names["torch._guards.TracingContext"]
    assert private_names.missing(names) == {}


def test_what_a_release_lacks_is_named_with_its_users() -> None:
    """A module that is gone, a name in a module, an attribute of a class."""
    gone = {"torch._gone.name": ["a.py"], "torch._guards.gone": ["b.py"], "torch._guards.TracingContext.gone": ["c.py"]}
    assert private_names.missing({**gone, "torch._guards.TracingContext.try_get": ["d.py"]}) == gone
