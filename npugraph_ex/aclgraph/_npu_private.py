"""The private parts of torch_npu that this library uses; apart from torch's own, because passes may not import torch_npu."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

from collections.abc import Callable

import torch


def set_deterministic_level(level: int) -> Callable[[], None]:
    """Set torch_npu's deterministic level, with the torch switch that it goes by, and return what puts both back.

    Its public setter warns at every call about the very switch that it sets, and there is no public getter.
    """
    import torch_npu

    switch, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    earlier = torch_npu.npu._get_deterministic_level()

    def restore() -> None:
        torch.use_deterministic_algorithms(switch, warn_only=warn_only)
        torch_npu._C._npu_set_deterministic_level(earlier)

    torch.use_deterministic_algorithms(level > 0, warn_only=warn_only)
    try:
        torch_npu._C._npu_set_deterministic_level(level)
    except BaseException:
        restore()
        raise
    return restore


def deterministic_level() -> int:
    """The deterministic level in force; torch_npu's own answer without the switch of torch is not asked for."""
    import torch_npu

    return int(torch_npu.npu._get_deterministic_level()) or int(torch.are_deterministic_algorithms_enabled())


def without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory alive; a tensor on the host as it is.

    What a captured call reads may be freed and reused later in the same graph; an update of the call needs its address.
    """
    import torch_npu

    weak: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor) if tensor.device.type == "npu" else tensor
    return weak


def current_stream_key(device: int) -> tuple[int, int, int]:
    """What tells a device's current stream from others: its id, device and device type; no Stream object is made."""
    import torch_npu

    key: tuple[int, int, int] = torch_npu._C._npu_getCurrentStream(device)
    return key
