"""The modelled time of work: its kernels' starts, and their bytes at the bandwidth of the emulated chip."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_emulator.chips import Chip
    from npugraph_ex.graph.launches import Launched


def chip() -> Chip:
    """The emulated chip; the usual one where nothing is emulated, or where the figures of the emulated one are not known."""
    from npu_emulator import current, is_active
    from npu_emulator.chips import CHIPS, DEFAULT

    return CHIPS.get(current().settings.soc, DEFAULT) if is_active() else DEFAULT


def modelled_us(work: Launched) -> float:
    """The microseconds that the kernels take to start, and their bytes to move; what they compute is not counted."""
    from npu_emulator.clock.roofline import LAUNCH_US

    return round(LAUNCH_US * work.kernels + 1e6 * work.bytes / chip().bandwidth, 2)
