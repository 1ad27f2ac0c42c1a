"""A saved graph on several devices: it runs where its inputs lie, as eager mode does, and is loaded for each such device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npugraph_ex.errors import SavedGraphError
from npugraph_ex.saving.inputs import InputCheck

Graph = Callable[..., Sequence[Any]]


class OnEachDevice:
    """Calls a saved graph on the device of its inputs.

    Args:
        check: raises for inputs that do not fit the compilation.
        loaded: the loaded graph by device index.
        load: loads it for another index.
        follows: whether it makes tensors on the current device, which the passes assume to be the inputs' device.
        elsewhere: runs calls for which that is not so; None to refuse them.
    """

    def __init__(
        self,
        check: InputCheck,
        loaded: dict[int, Graph],
        load: Callable[[int], Graph],
        *,
        follows: bool,
        elsewhere: Graph | None,
    ) -> None:
        self._check = check
        self._loaded = loaded
        self._load = load
        self._follows = follows
        self._elsewhere = elsewhere

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph.

        Raises:
            SavedGraphError: the inputs do not fit the compilation, or are not on the current device.
        """
        self._check(inputs)
        home = self._home(inputs)
        if self._follows and home != torch.npu.current_device():
            if self._elsewhere is not None:
                return self._elsewhere(*inputs)
            raise SavedGraphError(
                "the saved graph makes tensors on the current device and was compiled with its inputs there; now device "
                f"{torch.npu.current_device()} is current and the inputs lie on npu:{home}. Call it under "
                f"torch.npu.device({home}), or compile anew"
            )
        if home not in self._loaded:
            self._loaded[home] = self._load(home)
        return self._loaded[home](*inputs)

    def _home(self, inputs: Sequence[Any]) -> int:
        """The device index of the inputs, or of the current device if no input is on an NPU."""
        indices = {value.get_device() for value in inputs if isinstance(value, torch.Tensor) and not value.is_cpu}
        if len(indices) > 1:
            raise SavedGraphError(
                f"the saved graph takes inputs of one device, got some on each of npu:{', npu:'.join(map(str, sorted(indices)))}"
            )
        return next(iter(indices)) if indices else int(torch.npu.current_device())
