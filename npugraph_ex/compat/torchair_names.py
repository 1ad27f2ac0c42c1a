"""Which names of TorchAir's Python API a script may use here, and what stands in for the others.

The page docs/reference/torchair.md shows this table, and the errors of absent names quote it; a test tries every name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple, NoReturn

ACCEPTED = "accepted"
WITHOUT_EFFECT = "accepted without effect"
ABSENT = "absent"
_ORDER = "`ops.npu_tagged_event_record` and `ops.npu_tagged_event_wait` order streams"


class Name(NamedTuple):
    """One name of TorchAir, or a module of which every name is alike.

    Attributes:
        state: `ACCEPTED`, `WITHOUT_EFFECT` or `ABSENT`.
        differs: what differs, or what there is instead; empty if nothing differs.
    """

    state: str
    differs: str = ""


NAMES: Mapping[str, Name] = {
    "CompilerConfig": Name(
        ACCEPTED,
        'settings of the GE engine have no effect, with a warning; mode "max-autotune" is an error when a graph is compiled',
    ),
    "get_npu_backend": Name(ACCEPTED),
    "get_compiler": Name(ACCEPTED),
    "register_replacement": Name(ACCEPTED, "each match is checked; `npugraph_ex.last_report()` names refused ones"),
    "logger": Name(ACCEPTED),
    "inference.cache_compile": Name(
        ACCEPTED, "has the same arguments; `ge_cache` has no effect, and files that TorchAir saved are not read"
    ),
    "inference.readable_cache": Name(ACCEPTED, "reads files of this library"),
    "ops.npu_create_tagged_event": Name(ACCEPTED),
    "ops.npu_tagged_event_record": Name(ACCEPTED),
    "ops.npu_tagged_event_wait": Name(ACCEPTED),
    "ops.npu_record_tagged_stream": Name(ACCEPTED),
    "scope.npu_stream_switch": Name(ACCEPTED, "has no argument `enable_inner_parallel`, which is GE's"),
    "scope.limit_core_num": Name(ACCEPTED, "also has an effect in eager mode"),
    "scope.deterministic": Name(ACCEPTED),
    "configs.compiler_config.CompilerConfig": Name(ACCEPTED, "is `CompilerConfig`"),
    "core.utils.logger": Name(ACCEPTED, "is `logger`"),
    "ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce": Name(
        WITHOUT_EFFECT, "collectives are compiled as they are"
    ),
    "dynamo_export": Name(ABSENT, "no model is exported for GE; `inference.cache_compile` saves a compilation"),
    "register_fx_node_ge_converter": Name(
        ABSENT, "nothing is converted to GE; an operator with a fake implementation is compiled as it is"
    ),
    "use_internal_format_weight": Name(ABSENT, "`torch_npu.npu_format_cast` converts a weight"),
    "npu_format_cast_via_cpu": Name(ABSENT, "`torch_npu.npu_format_cast` converts a tensor"),
    "patch_for_hcom": Name(ABSENT, "collectives are compiled as they are; leave the call out"),
    "inference.set_dim_gears": Name(
        ABSENT, "`npugraph_ex.inference.session` returns an object whose `warm_up` captures a graph for each given size"
    ),
    "ops.npu_fused_infer_attention_score": Name(ABSENT, "call `torch_npu.npu_fused_infer_attention_score`"),
    "ops.npu_fused_infer_attention_score_v2": Name(ABSENT, "call `torch_npu.npu_fused_infer_attention_score_v2`"),
    "ops.npu_print": Name(ABSENT, "the option `dump_tensor_data` writes values to files"),
    "ops.record": Name(ABSENT, _ORDER),
    "ops.wait": Name(ABSENT, _ORDER),
    "scope.npu_wait_tensor": Name(ABSENT, _ORDER),
    "scope.super_kernel": Name(ABSENT, "no kernels are merged; leave the scope out"),
    "scope.op_never_timeout": Name(ABSENT, "no limit of time is set; leave the scope out"),
    "scope.data_dump": Name(ABSENT, "the option `dump_tensor_data` writes the values of a whole graph to files"),
    "experimental": Name(ABSENT, "`torch_npu.npu_format_cast` converts a weight"),
    "ge": Name(ABSENT, "no graph of GE is built; an operator with a fake implementation is compiled as it is"),
    "ge_concrete_graph.fx2ge_converter": Name(ABSENT, "nothing is converted to GE"),
    "ge_concrete_graph.ge_apis": Name(ABSENT, "no graph of GE is built"),
    "ge_concrete_graph.ge_converter.experimental.hcom_allgather": Name(ABSENT, "collectives are compiled as they are"),
    "ge_concrete_graph.ge_graph": Name(ABSENT, "no graph of GE is built"),
    "ge_concrete_graph.utils": Name(ABSENT, "no graph of GE is built"),
    "llm_datadist": Name(ABSENT, "no function makes tensors from addresses"),
    "npu_export": Name(ABSENT, "no model is exported for GE; `inference.cache_compile` saves a compilation"),
    "npu_fx_compiler": Name(ABSENT, "`torchair.get_compiler` and `torchair.get_npu_backend` are there"),
    "patterns": Name(ABSENT, "`torchair.register_replacement` is there"),
}
"""Each public name, after `torchair.`."""


def instead(name: str) -> str:
    """What there is instead of an absent name, for a message: empty, or a remark that begins with a colon."""
    known = NAMES.get(name)
    return f": {known.differs}" if known is not None and known.state == ABSENT else ""


def getattr_of(module: str, known: Sequence[str]) -> Callable[[str], NoReturn]:
    """Make the `__getattr__` of a module of `torchair` that has the known names: it says what there is instead of another."""

    def refuse(name: str) -> NoReturn:
        remark = instead(f"{module}.{name}")
        raise AttributeError(
            f"torchair.{module}, as npugraph_ex provides it, has no {name!r}{remark}. The module has {', '.join(known)}"
        )

    return refuse


class AbsentModules:
    """A finder that finds nothing: it says what there is instead of a module of TorchAir that this library has not.

    Args:
        ours: the package that `torchair` means while this finder answers.
    """

    def __init__(self, ours: ModuleType) -> None:
        self._ours = ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for an absent name; `from torchair import ge` asks for it below the package's own name."""
        del path, target
        if (
            not fullname.startswith(("torchair.", f"{self._ours.__name__}."))
            or sys.modules.get("torchair") is not self._ours
        ):
            return None
        name = fullname.removeprefix(f"{self._ours.__name__}.").removeprefix("torchair.")
        if remark := instead(name):
            raise ModuleNotFoundError(
                f"torchair, as npugraph_ex provides it, has no {name!r}{remark}", name=f"torchair.{name}"
            )
        return None
