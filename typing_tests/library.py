"""A typed client of `npugraph_ex`: every public name, used as the documentation uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from typing_extensions import assert_type

import npugraph_ex
from npugraph_ex.configs import compiler_config
from npugraph_ex.core.utils import logger


def versions() -> tuple[str, str]:
    """Names and keys are text."""
    return assert_type(npugraph_ex.__version__, str), npugraph_ex.cache_key({"capture_limit": 3}, model="mine")


def configured() -> npugraph_ex.CompilerConfig:
    """The object that scripts for TorchAir fill in, by each of its import paths."""
    config = npugraph_ex.CompilerConfig()
    same: npugraph_ex.config.CompilerConfig = compiler_config.CompilerConfig()
    assert_type(same, npugraph_ex.CompilerConfig)
    return assert_type(config, npugraph_ex.CompilerConfig)


def compiled(model: Callable[..., Any], gm: fx.GraphModule) -> list[object]:
    """Four ways to a compiled function."""
    backend = npugraph_ex.get_npu_backend(compiler_config=configured())
    compiler = npugraph_ex.get_compiler(configured())
    function = npugraph_ex.compile_fx(gm, options={"capture_limit": 3})
    saved = npugraph_ex.inference.cache_compile(model, cache_dir=Path("cache"))
    text: str = npugraph_ex.inference.readable_cache("cache/model.nge", print_output=False)
    explained = npugraph_ex.explain(model, torch.ones(2))
    by_dynamo = torch.compile(model, backend=backend)  # pyright: ignore[reportUnknownMemberType] - torch's own gap
    return [by_dynamo, compiler, function, saved, text, explained]


def scopes(event_tag: str) -> None:
    """Blocks that place work, and events between streams."""
    with npugraph_ex.scope.limit_core_num(8, 16), npugraph_ex.scope.deterministic(1):
        event = npugraph_ex.ops.npu_create_tagged_event(event_tag)
        npugraph_ex.ops.npu_tagged_event_record(event)
    with npugraph_ex.scope.npu_stream_switch("side"):
        npugraph_ex.ops.npu_tagged_event_wait(event)
        npugraph_ex.ops.npu_record_tagged_stream(torch.ones(2), "side")


def registered() -> None:
    """A replacement with its condition, an operator with host arguments."""
    wide = npugraph_ex.ShapeRange("x", dim=-1, at_least=16)
    like = npugraph_ex.LikeExamples(x=torch.ones(2), y=torch.ones(2))

    def search(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def replace(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(x, y)

    npugraph_ex.register_replacement(search, replace, [torch.ones(2), torch.ones(2)], extra_check=wide)
    npugraph_ex.register_replacement(search, replace, [torch.ones(2), torch.ones(2)], extra_check=like)
    npugraph_ex.register_host_arguments("mine::attention", ["lengths"])


def observed() -> int:
    """What happened, and starting anew."""
    assert_type(npugraph_ex.logger, logging.Logger)
    logger.setLevel(logging.DEBUG)
    report = npugraph_ex.last_report()
    if report is not None:
        npugraph_ex.logger.info("%s", report)
    return assert_type(npugraph_ex.invalidate(), int)


def refused(error: Exception) -> bool:
    """Errors have one root."""
    return isinstance(error, npugraph_ex.errors.NpuGraphExError)


def served(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A session, with captures ahead."""
    step = npugraph_ex.inference.session(model, (x,), dynamic=True, options={"capture_limit": 3})
    step.warm_up([1, 2], lambda size: (torch.ones(size),))
    step.debug = True
    step.refresh()
    result: torch.Tensor = step(x, flag=True)
    return result


def older_scripts() -> list[ModuleType]:
    """The packages that a bare import brings, for scripts written for other libraries."""
    npugraph_ex.compat.use_as_torchair()
    kept = [npugraph_ex.cache, npugraph_ex.configs, npugraph_ex.core, npugraph_ex.integrations]
    return [*kept, npugraph_ex.npu_fx_compiler, npugraph_ex.observe, npugraph_ex.patterns]


@npugraph_ex.operators.Operator(
    name="mine::scaled", examples=(lambda: npugraph_ex.operators.call(torch.ones(2)),), synonyms={"dtype": {1: None}}
)
def scaled(x: torch.Tensor, by: float = 2.0, dtype: int | None = None) -> torch.Tensor:
    """An operator of the client's own: the decorated function keeps its type."""
    return x * by if dtype is None else x


def described() -> npugraph_ex.operators.Operator:
    """The record of an operator, by name."""
    assert_type(scaled(torch.ones(2), 3.0), torch.Tensor)
    return npugraph_ex.operators.OPERATORS["mine::scaled"]
