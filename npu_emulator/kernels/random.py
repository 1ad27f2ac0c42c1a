"""Random operators: numbers come from the device's generator, advance it, and differ from replay to replay.

A kernel seeds the CPU generator for the time of its run from (seed, offset) of the device's generator, so the same seed
gives the same numbers and the host's own random numbers are not disturbed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.generic import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from npu_emulator.kernels.arguments import Bound

__all__ = ["RandomKernel", "is_random"]

_MASK = (1 << 63) - 1
_SPREAD = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring offsets give unrelated seeds
_STEP = 4  # Philox offsets, which torch's generators count in, come in multiples of four


def is_random(op: OpOverload) -> bool:
    """Tell whether an operator draws random numbers."""
    takes_generator = any("Generator" in str(argument.type) for argument in op._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in op.tags


class RandomKernel(Kernel):
    """A kernel that draws from the device's generator: at launch in eager mode, at each replay in a captured graph."""

    def _bind(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        del args
        generator = kwargs.get("generator")
        if generator is None:
            generator = torch.npu.default_generators[bound.device if bound.device >= 0 else torch.npu.current_device()]
        compute = self.compute
        if torch.npu.is_current_stream_capturing():
            return lambda *cpu_args, **cpu_kwargs: _run_seeded(compute, _draw(generator), cpu_args, cpu_kwargs)
        seed = _draw(generator)
        return lambda *cpu_args, **cpu_kwargs: _run_seeded(compute, seed, cpu_args, cpu_kwargs)


def _draw(generator: torch.Generator) -> int:
    """Take the next seed of a generator and advance it."""
    offset = generator.get_offset()
    generator.set_offset(offset + _STEP)
    return (generator.initial_seed() + (offset + 1) * _SPREAD) & _MASK


def _run_seeded(compute: Callable[..., Any], seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "generator" in kwargs:
        kwargs = {**kwargs, "generator": None}
    saved = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        return compute(*args, **kwargs)
    finally:
        torch.set_rng_state(saved)
