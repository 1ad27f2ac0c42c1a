"""What users of vLLM-Ascend write under `additional_config`, in both ages of its spelling.

The older spelling is ``{"npugraph_ex_config": {"enable": …, "enable_static_kernel": …}}``, off unless enabled. The newer
is ``{"ascend_compilation_config": {"enable_npugraph_ex": …, "enable_static_kernel": …}}``, on unless disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npugraph_ex.config import CompilerConfig, Options
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.config.option import unknown_option
from npugraph_ex.errors import OptionValueError

OLDER, NEWER = "npugraph_ex_config", "ascend_compilation_config"

_OF_THE_CLIENT = frozenset({"fuse_norm_quant", "fuse_qknorm_rope", "fuse_allreduce_rms"})
"""Keys of the older section that steer vLLM-Ascend's own fusions."""


@dataclass(frozen=True)
class VllmSettings:
    """What the user asked for.

    Attributes:
        enable: compile with this library; otherwise graphs run as they are.
        enable_static_kernel: compile kernels for the batch sizes that the engine captures.
    """

    enable: bool = True
    enable_static_kernel: bool = False

    @classmethod
    def of(cls, additional_config: Mapping[str, Any] | None) -> VllmSettings:
        """Read ``vllm_config.additional_config``; the newer section counts where both are given.

        Raises:
            OptionError: a section is no dict, a value no bool, or a key of the older section is unknown.
        """
        given = additional_config or {}
        if NEWER in given:
            # vLLM-Ascend keeps more here than this library knows, so an unknown key is not refused.
            section = _section(given, NEWER)
            return cls(_switch(section, NEWER, "enable_npugraph_ex", default=True), _static(section, NEWER))
        if OLDER in given:
            section = _section(given, OLDER)
            known = {"enable", "enable_static_kernel", *_OF_THE_CLIENT}
            for name in section:
                if name not in known:
                    raise unknown_option(name, known, where=OLDER)
            return cls(_switch(section, OLDER, "enable", default=False), _static(section, OLDER))
        return cls()

    def options(self, batch_sizes: list[int] | None = None) -> dict[str, object]:
        """The compile options that vLLM needs: passes only, because the engine captures and owns the memory.

        Args:
            batch_sizes: the sizes that the engine will capture; static kernels are compiled for these.
        """
        options: dict[str, object] = {
            "force_eager": True,
            # vLLM's own choice: in-place forms without a device kernel once fell back to the CPU (vllm-ascend#7213).
            "inplace_pass": False,
            "clone_input": False,
            "clone_output": False,
        }
        if self.enable_static_kernel:
            options["static_kernel_compile"] = True
            options["_vllm_aclnn_static_kernel_sym_range"] = list(batch_sizes or ())
        Options.from_mapping(options)
        return options

    def compiler_config(self, batch_sizes: list[int] | None = None) -> CompilerConfig:
        """The same as a `CompilerConfig`."""
        config = CompilerConfig()
        apply_flat(config, self.options(batch_sizes))
        return config


def captured_batch_sizes(vllm_config: Any) -> list[int]:
    """The batch sizes of pure decoding among those that vLLM captures.

    A decoding step takes one token a sequence, and as many more as are speculated.
    """
    speculative = vllm_config.speculative_config
    tokens = 1 + (speculative.num_speculative_tokens if speculative else 0)
    most = vllm_config.scheduler_config.max_num_seqs * tokens
    return [size for size in vllm_config.compilation_config.cudagraph_capture_sizes if tokens <= size <= most]


def _section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = given[name]
    if not isinstance(section, Mapping):
        raise OptionValueError(f"additional_config[{name!r}] takes a dict, got {section!r} ({type(section).__name__})")
    return section


def _switch(section: Mapping[str, Any], where: str, name: str, *, default: bool) -> bool:
    value = section.get(name, default)
    if not isinstance(value, bool):
        raise OptionValueError(
            f"additional_config[{where!r}][{name!r}] takes True or False, got {value!r} ({type(value).__name__})"
        )
    return value


def _static(section: Mapping[str, Any], where: str) -> bool:
    return _switch(section, where, "enable_static_kernel", default=False)
