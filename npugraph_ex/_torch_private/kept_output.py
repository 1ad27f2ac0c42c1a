"""The object that AOT keeps under `aot_compile` instead of a compiled graph's function.

The package does not import it, because it imports Inductor, whose class AOT requires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.output_code import OutputCode

Boxed = Callable[[list[Any]], Sequence[Any]]


class KeptOutput(OutputCode):
    """A compiled graph that can be called and saved.

    Args:
        run: the graph, a function of one list of inputs.
        text: the saved form; empty if it would be useless in another process.
        load: makes the saved form callable. It is a module's function, because pickle stores it by name.
    """

    def __init__(self, run: Boxed, text: str, load: Callable[[str], Boxed]) -> None:
        super().__init__()
        self._boxed_call = True  # of the object, because AOT's wrappers copy its attributes
        self._run: Boxed | None = run
        self._load = load
        self._text = text

    def __call__(self, inputs: Any) -> Any:
        """Run the graph."""
        if self._run is None:
            self._run = self._load(self._text)
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave the text alone; AOT calls this on a shallow copy, while it compiles."""
        self._run = None

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        """Load the graph now and not at its first call, so that errors appear now."""
        del args, kwargs
        if self._run is None:
            self._run = self._load(self._text)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: there is no Triton here."""


def uncompiled(gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
    """A graph that runs operator by operator, in a form that AOT can keep."""
    return boxed_nop(gm, list(example_inputs))
