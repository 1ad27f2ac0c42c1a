"""Chips with public figures: the resources of such a device, and the rates for the modelled clock.

Every figure is that of the chip's platform file in the public sources of CANN's runtime, folder src/platform/platform_config/cann
of https://github.com/hicann/runtime (mirrored from https://gitcode.com/cann/runtime), file `<name>.ini`:

- `cube_core_cnt` (on the 310P `ai_core_cnt`), `vector_core_cnt`, `memory_size`, `l2_size` and `normal_stream_num` as they are;
- a cube multiplies `cube_m_size` x `cube_k_size` x `cube_n_size` = 16 x 16 x 16 float16 pairs each cycle of `cube_freq`, and
  by `[DtypeMKN]` twice as many in int8;
- `ddr_rate` is read as bytes from and to device memory a cycle and core;
- `vec_calc_size` 128 is read as float16 lanes of a vector unit, 256 bytes a cycle. On chips with split cores the file names
  no frequency for them; the cubes' is taken, which is an assumption.

A check from outside the files: the 310P3 comes to 69 TFLOPS in float16 and 207 GB/s, where its cards are sold as 70 and 204.8.
A device of any other chip has the default's budgets, and its clock is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_emulator.errors import EmulatorError

__all__ = ["CHIPS", "DEFAULT", "Chip", "with_figures"]

_GIB, _MIB = 1 << 30, 1 << 20
_CUBE = 16 * 16 * 16
"""Multiply-adds in float16 of one cube in a cycle."""
_VECTOR_BYTES = 256
"""Bytes that a vector unit processes in a cycle."""


@dataclass(frozen=True)
class Chip:
    """Public figures of one chip."""

    name: str
    cube_cores: int
    vector_cores: int
    memory: int
    """Bytes of device memory."""
    l2: int
    """Bytes of the second-level cache."""
    streams: int
    half_flops: float
    """Floating-point operations a second of all cube cores in float16; a multiply-add counts as two."""
    vector_bytes: float
    """Bytes a second that all vector units process."""
    bandwidth: float
    """Bytes a second from and to device memory."""
    events: int | None = None
    """None if the file gives no number."""


def _split(name: str, cores: int, megahertz: int, *, memory: int, l2: int) -> Chip:
    """A chip of the 910B or A3 family: split cores, two vector cores beside each cube core, 2048 streams."""
    hertz = megahertz * 1e6
    return Chip(
        name=name,
        cube_cores=cores,
        vector_cores=2 * cores,
        memory=memory * _GIB,
        l2=l2 * _MIB,
        streams=2048,
        half_flops=cores * hertz * 2 * _CUBE,
        vector_bytes=2 * cores * hertz * _VECTOR_BYTES,
        bandwidth=cores * hertz * 32,
    )


_ALL = (
    _split("Ascend910B1", 24, 1850, memory=64, l2=192),
    _split("Ascend910B2", 24, 1800, memory=64, l2=192),
    _split("Ascend910B3", 20, 1800, memory=64, l2=192),
    _split("Ascend910B4", 20, 1500, memory=32, l2=96),
    _split("Ascend910_9362", 20, 1500, memory=32, l2=168),  # a die of Atlas A3
    _split("Ascend910_9391", 24, 1850, memory=64, l2=192),  # likewise
    Chip(
        name="Ascend310P3",
        cube_cores=8,
        vector_cores=7,
        memory=24_000_000_000,
        l2=16 * _MIB,
        streams=1024,
        half_flops=8 * 1.06e9 * 2 * _CUBE,
        vector_bytes=(8 * 1.06e9 + 7 * 1.0e9) * _VECTOR_BYTES,  # its AI cores have vector units too
        bandwidth=8 * 1.06e9 * 17 + 7 * 1.0e9 * 9,  # each kind of core has its own rate
        events=1024,  # max_hardware_eventid_num
    ),
)
CHIPS = {chip.name: chip for chip in _ALL}
"""The chips by torch_npu's names."""
DEFAULT = CHIPS["Ascend910B2"]
"""24 cube and 48 vector cores, 64 GiB: the default of an emulated device."""


def with_figures(name: str) -> Chip:
    """Return the chip of that name, or raise EmulatorError if its figures are not known here."""
    chip = CHIPS.get(name)
    if chip is None:
        raise EmulatorError(
            f"the clock of {name} cannot be modelled: its figures are not known here; choose one of {', '.join(CHIPS)} "
            "(--soc, NPU_EMULATOR_SOC)"
        )
    return chip
