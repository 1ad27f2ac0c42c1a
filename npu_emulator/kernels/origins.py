"""Where the kernel of each operator is from: the CPU, a formula, torch_npu, a composition, or nowhere. Runs no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BY_THE_CPU",
    "COMPOSED",
    "DEVICE",
    "FALLBACK",
    "FORMULA",
    "NONE",
    "PACKAGE",
    "RANDOM",
    "TORCH_NPU",
    "all_origins",
]

BY_THE_CPU = "torch's CPU kernel"
FALLBACK = "torch's CPU kernel, on hardware too"
"""torch_npu has none and falls back to the CPU."""
RANDOM = "torch's CPU kernel, with the device's random numbers"
DEVICE = "a copy or a conversion of the emulated device"
FORMULA = "a formula of npu_emulator"
PACKAGE = "a formula of a package, or another form of one"
COMPOSED = "composed of other operators"
TORCH_NPU = "torch_npu's own, which computes nothing"
NONE = "no kernel"
_COMPOSITIONS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def all_origins(registered: Mapping[str, str], namespaces: tuple[str, ...] = ("aten", "npu", "atb")) -> dict[str, str]:
    """The origin of every overload of these libraries, by name, in order; ``registered`` has those of the emulator's kernels."""
    listed = torch._C._dispatch_get_registrations_for_dispatch_key  # noqa: SLF001 - no public list of kernels
    composed = {name for key in _COMPOSITIONS for name in listed(key)}
    of_torch_npu = set(listed("PrivateUse1"))

    def origin(name: str) -> str:
        found = registered.get(name) or (TORCH_NPU if name in of_torch_npu else COMPOSED if name in composed else NONE)
        of_result = name.removesuffix("out").rstrip("._")
        return origin(of_result) if found == COMPOSED and name.endswith("out") and of_result in known else found

    # The dispatcher names kernels without a schema, too, and the list of schemas has those of TorchScript.
    schemas = torch._C._jit_get_all_schemas()  # noqa: SLF001 - no public list of operators
    known = {f"{schema.name}.{schema.overload_name}".removesuffix(".") for schema in schemas}
    known &= set(torch._C._dispatch_get_all_op_names())  # noqa: SLF001 - as above
    return {name: origin(name) for name in sorted(known) if name.partition("::")[0] in namespaces}
