"""Compiles a rule's own search function by `torch.compile`, as users do, and asks whether the rule fuses there.

Random programs are made of the operators of a trace. What Dynamo and AOT make of the function itself may differ from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import npugraph_ex
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing.crashes import CrashedError
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.eager import random_tensors
from npugraph_ex.testing.validation.survey import Setting, arguments_of, computing


def missed_by_torch_compile(
    prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting], options: Mapping[str, Any]
) -> str:
    """Why nothing is fused where the search function is compiled, and trained if the rule is for that; empty where it is once."""
    reason = "nothing in the graph that AOT makes looks like it"
    for setting in settings:
        tensors = random_tensors(pattern, setting)
        for argument, tensor in zip(pattern.arguments, tensors, strict=True):
            tensor.requires_grad_(prepared.training and argument.gradient)
        torch.compiler.reset()
        compiled = torch.compile(prepared.rule.search, backend="npugraph_ex", options={**options, "force_eager": True})
        try:
            with computing(setting, " through torch.compile"), torch.set_grad_enabled(prepared.training):
                compiled(*arguments_of(pattern, tensors, setting.numbers))
        except CrashedError as error:
            reason = str(error)
            continue
        report = npugraph_ex.last_report()
        if report is None or report.fusions(prepared.rule.name):
            return ""
        reason = next((miss.reason for miss in report.near_misses(prepared.rule.name)), reason)
    return reason
