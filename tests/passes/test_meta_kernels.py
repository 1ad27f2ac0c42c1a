"""Metadata by an operator's meta kernel alone is what the fake mode says, also where the kernel alone would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Iterator[None]:
    """An operator with two results, of which one is on the CPU, and one whose result follows from the device."""
    with _torch_private.scoped_library("meta_kernels") as library:
        library.define("counted(Tensor x) -> (Tensor, Tensor)")
        torch.library.register_fake(
            "meta_kernels::counted",
            lambda x: (torch.empty_like(x), torch.empty((), dtype=torch.int64, device="cpu")),
            lib=library,
        )
        library.define("by_device(Tensor x) -> Tensor")
        torch.library.register_fake(
            "meta_kernels::by_device", lambda x: x.to(torch.int8) if x.device.type == "npu" else x.clone(), lib=library
        )
        yield


def _seen(results: Any) -> list[object]:
    return [
        (tuple(map(str, leaf.shape)), tuple(map(str, leaf.stride())), leaf.dtype, leaf.device, type(leaf))
        for leaf in pytree.tree_leaves(results)
    ]


def _calls(x: torch.Tensor, y: torch.Tensor) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    return {
        "plain": (aten.mul.Tensor, (x, x), {}),
        "a view": (aten.view.default, (x, [4, 2]), {}),
        "a device": (aten._to_copy.default, (x,), {"device": torch.device("cpu")}),
        "two devices": (aten.add.Tensor, (x, y.new_empty((), device="cpu")), {}),
        "a real tensor": (aten.add.Tensor, (x, torch.ones(())), {}),
        "a result elsewhere": (torch.ops.meta_kernels.counted.default, (x,), {}),
        "a fake function": (torch.ops.meta_kernels.by_device.default, (x,), {}),
        "a write": (aten.add_.Tensor, (x, y), {}),
        "elements decide": (aten.nonzero.default, (x,), {}),
    }


NAMES = (
    "plain",
    "a view",
    "a device",
    "two devices",
    "a real tensor",
    "a result elsewhere",
    "a fake function",
    "a write",
    "elements decide",
)


@pytest.mark.parametrize("call", NAMES)
def test_the_kernel_alone_answers_as_the_mode_does(call: str) -> None:
    """Shapes, strides, dtypes and devices are equal; a size that depends on elements is a new symbol in both."""
    answers = []
    for alone in (True, False):
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with mode:
            x, y = (torch.empty(2, 4, dtype=torch.float16, device="npu") for _ in range(2))
            operator, args, kwargs = _calls(x, y)[call]
        with _torch_private.fake_execution(mode):
            results = (
                _torch_private.run_meta_kernel(mode, operator, args, kwargs) if alone else operator(*args, **kwargs)
            )
        answers.append(_seen(results))
        assert all(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(results))
    assert answers[0] == answers[1]


def test_what_a_kernel_refuses_is_said_by_the_mode() -> None:
    """The error names what is wrong, as it would without the shortcut."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 4, device="npu")
    with _torch_private.fake_execution(mode), pytest.raises(RuntimeError, match="invalid for input of size"):
        _torch_private.run_meta_kernel(mode, aten.view.default, (x, [3, 3]), {})


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        (_torch_private.real_execution, False),
        (partial(_torch_private.fake_execution, None, symbolic=False), False),
        (partial(_torch_private.fake_execution, None, symbolic=True), True),
    ],
    ids=["real", "numbers as sizes", "symbols as sizes"],
)
def test_only_symbolic_sizes_meet_the_python_dispatcher(
    execution: Callable[[], AbstractContextManager[None]], *, expected: bool
) -> None:
    """AOT calls a backend with it, and it triples the time of an operator."""
    key = torch._C.DispatchKey.PythonDispatcher
    with enable_python_dispatcher():
        with execution():
            assert torch._C._dispatch_tls_is_dispatch_key_included(key) == expected
        assert torch._C._dispatch_tls_is_dispatch_key_included(key)
