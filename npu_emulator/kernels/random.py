"""Random operators: numbers come from the device's generator, advance it, and differ from replay to replay.

A kernel seeds the CPU's generator during its run and restores it, so equal seeds give equal numbers and the host's own random
numbers do not change.
"""

from __future__ import annotations

import inspect
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.communicating import CommunicatingKernel
from npu_emulator.kernels.generic import Kernel
from npu_emulator.kernels.registry import DRAWS, RANKS
from npu_emulator.kernels.undeclared import UndeclaredWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload

    from npu_emulator.kernels.arguments import Bound
    from npu_emulator.launch import Launcher

__all__ = ["DISTRIBUTIONS", "RandomKernel", "is_random", "kernel_with", "seeded"]


def is_random(op: OpOverload) -> bool:
    """Tell whether an operator draws random numbers."""
    takes_generator = any("Generator" in str(argument.type) for argument in op._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in op.tags


def kernel_with(op: OpOverload, launcher: Launcher, compute: Callable[..., Any]) -> Kernel:
    """Return the kernel of another package's operator.

    It draws random numbers, from torch's generator, if `compute` has an attribute `draws_random_numbers`: a function of the
    operator's arguments which tells whether a call draws. Its attribute `writes` names undeclared written arguments. A kernel
    that communicates is a generator function, or has one as its attribute `across_ranks`.
    """
    if inspect.isgeneratorfunction(compute):
        return CommunicatingKernel(op, launcher, compute)
    if hasattr(compute, RANKS):
        return CommunicatingKernel(op, launcher, getattr(compute, RANKS), compute)
    if getattr(compute, "writes", ()):
        return UndeclaredWriter(op, launcher, compute)
    return (RandomKernel if hasattr(compute, DRAWS) else Kernel)(op, launcher, compute)


class RandomKernel(Kernel):
    """A kernel that draws from the device's generator. `random_seeds` gives each launch and each replay its seed."""

    def _bind(self, bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        return seeded(self._launcher, self.compute, bound.device, args, kwargs)

    def _knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Such numbers are a seed and counts of sizes: a call that draws nothing has no seed."""
        draws = getattr(self.compute, DRAWS, None)
        return draws is not None and not draws(*args, **kwargs)


def seeded(
    launcher: Launcher, compute: Callable[..., Any], device: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """Return the function of one launch on a device (below 0: the current one), with numbers from the device's generator.

    This advances the generator, unless `draws_random_numbers` of `compute` says that this call draws none.
    """
    draws = getattr(compute, DRAWS, None)
    if draws is not None and not draws(*args, **kwargs):
        return compute
    device = device if device >= 0 else torch.npu.current_device()
    generator = kwargs.get("generator")
    if generator is None:
        generator = torch.npu.default_generators[device]
    seed = launcher.draws.next(generator, launcher.stream_of(device))
    return lambda *cpu_args, **cpu_kwargs: _run_seeded(compute, seed(), cpu_args, cpu_kwargs)


def _run_seeded(compute: Callable[..., Any], seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "generator" in kwargs:
        kwargs = {**kwargs, "generator": None}
    saved = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        return compute(*args, **kwargs)
    finally:
        torch.set_rng_state(saved)


_PART = 1 << 18
"""Elements that go through all steps of a formula at a time, so that they stay in the processor's cache."""


def _exponential(self: torch.Tensor, lambd: float = 1, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """``-log(u) / lambd`` of uniform numbers u, as a device computes it: five times as fast as the CPU's own kernel.

    u is one half step below 1 at most, so that no result is 0; float16 and bfloat16 are drawn in float32.
    """
    if not lambd > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    if math.isinf(lambd):
        return self.zero_()
    parts = self.view(-1).split(_PART) if self.is_contiguous() and self.numel() > 1 else (self,)
    for part in parts:
        wide = part if part.dtype in {torch.float32, torch.float64} else torch.empty_like(part, dtype=torch.float32)
        below = 1 - torch.finfo(wide.dtype).eps / 2
        wide.uniform_(generator=generator).neg_().add_(1).clamp_(max=below).log_().mul_(-1 / lambd)
        if wide is not part:
            part.copy_(wide)
    return self


setattr(_exponential, DRAWS, lambda *args, **kwargs: True)  # noqa: ARG005 - of any arguments
DISTRIBUTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({"aten::exponential_": _exponential})
"""Random operators that a device computes in another way than the CPU."""
