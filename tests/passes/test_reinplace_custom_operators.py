"""Custom operators that mutate their arguments: values, aliases and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled, random, through_aot
from fx_helpers import evaluate
from reinplacing import operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from npugraph_ex.config.options import Options
from npugraph_ex.graph.operators import named_arguments, read_by
from npugraph_ex.operators import OPERATORS
from npugraph_ex.passes import pipeline
from npugraph_ex.versions import out_tag

aten = torch.ops.aten


@pytest.fixture(scope="module")
def update() -> Any:
    """A custom operator with two mutated arguments and a result."""

    @torch.library.custom_op("npugraph_ex_tests::update", mutates_args=("a", "c"))
    def operator(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        c.mul_(2)
        return a + c

    operator.register_fake(lambda a, _b, _c: torch.empty_like(a))
    return torch.ops.npugraph_ex_tests.update


PLAIN = {"inplace_pass": False, "input_inplace_pass": False, "remove_noop_ops": False}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, PLAIN], ids=["passes on", "passes off"])
@pytest.mark.parametrize("version", [1, 2])
def test_custom_operators_that_mutate(update: Any, version: int, options: dict[str, bool]) -> None:
    """Either wrapper of AOT around an operator with several mutated arguments is unwrapped, and needless copies go."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        first = update(x, b, scratch)
        second = update(x[1:], b[1:], scratch[1:])
        return first, second, scratch

    wrappers = []

    def note(gm: torch.fx.GraphModule, _inputs: object, _config: object) -> None:
        wrappers.extend(str(node.target) for node in gm.graph.nodes if "auto_functionalized" in str(node.target))

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3), post_grad_custom_pre_pass=note, **options)
    assert set(wrappers) == {"auto_functionalized" if version == 1 else "auto_functionalized_v2"}
    assert found.count("npugraph_ex_tests.update.default") == 2
    assert not any("auto_functionalized" in name for name in found)
    # The first version writes views back through their base, which takes a copy of it.
    assert options or version == 1 or "aten.clone.default" not in found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"inplace_pass": False}], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_a_mutating_custom_operator_costs_no_copy(update: Any, version: int, options: dict[str, bool]) -> None:
    """On whole tensors no copy is left, whichever wrapper AOT takes, also where other operators do not compute in place."""

    def function(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch = b + 1
        return update(x, b, scratch), scratch

    with torch._inductor.config.patch(enable_auto_functionalized_v2=version == 2):
        found = operators(function, random(4, 3), random(4, 3), **options)
    launched = [name for name in found if name not in {"aten.as_strided.default", "aten.detach.default"}]  # views
    assert launched == ["aten.add.Tensor", "npugraph_ex_tests.update.default"]


FUNCTIONAL = sorted(name for name, record in OPERATORS.items() if name.endswith("_functional") and record.overload)


@pytest.mark.slow
@pytest.mark.parametrize("written_back", [True, False], ids=["written back", "kept"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_forms_write_what_the_program_writes(name: str, written_back: bool) -> None:
    """torch_npu's functional forms compute in place where their copies are written back; else the arguments stay as they are."""
    functional, plain = (OPERATORS[one].overload for one in (name, name.removesuffix("_functional")))
    assert functional is not None
    assert plain is not None
    written = [one.name for one in plain._schema.arguments if one.alias_info is not None]
    args, kwargs = OPERATORS[name].calls()[0]
    leaves, form = tree_flatten((args, kwargs))
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    named = named_arguments(functional, args, kwargs)
    places = [next(at for at, one in enumerate(own) if one is named[argument]) for argument in written]
    tensors = [one.npu() for one in own]

    def program(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(inputs)
        args, kwargs = tree_unflatten(
            [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form
        )
        results = functional(*args, **kwargs)
        if written_back:
            for place, changed in zip(places, results[-len(places) :], strict=True):
                inputs[place].copy_(changed)
        return tuple(result.float().sum() for result in results)

    check(program, [[value.clone() for value in tensors] for _ in range(2)])
    _, launched = through_aot(program, *tensors)
    assert launched.count(str(plain)) == 1
    assert launched.count("aten.clone.default") == (0 if written_back else len(written))


@pytest.fixture(scope="module")
def accumulate() -> Any:
    """A custom operator that adds to a keyword-only argument, which an ``out`` of torch would only be filled."""
    library = torch.library.Library("npugraph_ex_tests", "FRAGMENT")
    library.define("accumulate(Tensor x, *, Tensor(a!) state) -> Tensor")
    library.impl("accumulate", lambda x, *, state: state.add_(x) * 2, "CompositeExplicitAutograd")
    yield torch.ops.npugraph_ex_tests.accumulate.default
    library._destroy()


def test_a_written_keyword_is_read_unless_it_is_an_out(accumulate: Any) -> None:
    """An operator computes in no memory that a later one adds to, which its schema tells from an ``out`` by no flag."""

    def program(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return torch.relu(y) * 2, accumulate(z, state=y)

    x, z = torch.randn(8) - 2, torch.randn(8)
    gm = make_fx(program, tracing_mode="fake")(x, z)
    optimise = tuple(pass_ for pass_ in pipeline.PIPELINE if pass_.name == "reinplace_intermediates")
    pipeline.run(gm, [x, z], Options(), passes=optimise)
    for have, want in zip(evaluate(gm, x, z), program(x, z), strict=True):
        assert torch.equal(have, want)


def test_an_out_is_not_read_and_a_cache_is() -> None:
    """torch_npu tags as outs some caches of which an operator writes a few rows."""
    graph = torch.fx.Graph()
    key, slots, memory = (graph.placeholder(name) for name in ("key", "slots", "memory"))
    cached = graph.call_function(torch.ops.npu.npu_scatter_pa_cache.value, (key, slots), {"key_cache": memory})
    summed = graph.call_function(aten.add.out, (key, key), {"out": memory})
    assert read_by(cached) == (key, slots, memory)
    assert read_by(summed) == (key,)


@pytest.fixture(scope="module")
def store() -> Any:
    """A custom operator with an ``out``, which it returns."""
    library = torch.library.Library("npugraph_ex_tests", "FRAGMENT")
    library.define("store(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    for key in ("PrivateUse1", "CPU"):
        library.impl("store", lambda x, *, out: out.copy_(x), key)
    library.impl("store", lambda _x, *, out: out, "Meta")
    yield torch.ops.npugraph_ex_tests.store.default
    library._destroy()


@pytest.mark.slow
@pytest.mark.skipif(out_tag.DIFFERENCE.older, reason=out_tag.DIFFERENCE.what)
@pytest.mark.parametrize("options", [{}, PLAIN], ids=["passes on", "passes off"])
def test_custom_operators_with_an_out(store: Any, options: dict[str, bool]) -> None:
    """AOT's wrapper of an operator with one ``out`` has one result, and no list of them."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = y * 2
        first = store(x, out=y) + 1
        store(x[1:], out=y[:-1])
        return before, first, y + 1

    assert operators(function, random(4, 3), random(4, 3), **options).count("npugraph_ex_tests.store.default") == 2


@pytest.mark.skipif(out_tag.DIFFERENCE.older, reason=out_tag.DIFFERENCE.what)
def test_a_cache_that_torch_takes_for_an_out_is_refused() -> None:
    """What AOT drops cannot be had back: the message says which operator, which cache, and what to do."""

    def function(key: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        torch.ops.npu.npu_scatter_pa_cache.value(key, slots, key_cache=cache)
        return cache + 1

    with pytest.raises(Exception, match=r"npu_scatter_pa_cache\.value.*mutates_args=\['key_cache'\]") as raised:
        compiled(function)(random(3, 4), torch.tensor([0, 2, 5], device=NPU), random(2, 3, 4))
    assert "test_reinplace_custom_operators.py" in str(raised.value)
