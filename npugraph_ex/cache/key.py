"""`cache_key`: equal for two compilations exactly when one may stand for the other."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import torch

from npugraph_ex._version import __version__
from npugraph_ex.aclgraph import scopes
from npugraph_ex.cache.dependencies import reached
from npugraph_ex.cache.fingerprint import fingerprint
from npugraph_ex.config.options import Options
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import FusionRule


def key_parts(options: Mapping[str, object] | None = None, **further: object) -> dict[str, str]:
    """What the key is made of, by name; for `npugraph-ex cache show` and for finding out why a cache missed.

    Args:
        options: as in ``torch.compile(options=...)``.
        further: what else decides, by name, for example the method that is compiled.

    Raises:
        OptionError: a wrong option.
    """
    chosen = Options.from_mapping(options).changed()
    rules = [_rule(prepared.rule) for prepared in USER_RULES.snapshot()]
    return {
        "npugraph_ex": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "torch_npu": _torch_npu(),
        "device": torch.npu.get_device_name() if torch.npu.is_available() else "none",
        "options": _options(chosen),
        "rules": fingerprint(rules),
        "helpers": _digest_of(reached([chosen, rules, further.get("decompositions")])),
        "scopes": fingerprint(scopes.key()),
        "deterministic": str(scopes.deterministic_level()),
        **{name: fingerprint(value) for name, value in further.items()},
    }


@cache
def _torch_npu() -> str:
    """The version, which is read from a file."""
    return version("torch_npu")


def _options(chosen: Mapping[str, object]) -> str:
    """The options that differ from their defaults, in one order; functions among them by their code."""
    return fingerprint({name: chosen[name] for name in sorted(chosen)})


def _rule(rule: FusionRule) -> list[object]:
    """A registered replacement, by what it was declared with; example inputs only serve tracing."""
    from torch._inductor.pattern_matcher import PatternPrettyPrinter  # first by `fusion`, which imports less with it

    pattern = PatternPrettyPrinter.run(rule.pattern) if rule.pattern is not None else None
    return [rule.name, rule.search, rule.replace, rule.condition, rule.scalars, rule.trace_fn, pattern]


def cache_key(options: Mapping[str, object] | None = None, **further: object) -> str:
    """A digest over everything that a saved compilation depends on besides the graph itself.

    It covers the options, the registered rules and the passes, each with its source, what it closes over, what it reaches by
    global names in the user's own modules, and the files that all of these stand in; the versions of this library, of torch,
    torch_npu and Python; the device; and the scopes and the deterministic level in force.

    Args:
        options: as in ``torch.compile(options=...)``.
        further: what else decides, by name.

    Returns:
        64 hexadecimal digits.
    """
    return digest(key_parts(options, **further))


def digest(parts: Mapping[str, str]) -> str:
    """The key made of ``parts``."""
    return _digest_of(dict(parts))


def _digest_of(value: list[str] | dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
