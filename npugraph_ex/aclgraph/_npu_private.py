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
