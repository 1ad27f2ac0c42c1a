"""Families of examples: what a mutant, or a bug that came back, is looked for with. Each turns a seed into one example.

An example answers which promise it found broken; nothing when all is well. The same seed is the same example everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

import torch

from npugraph_ex.testing.generator.strategies import Maker, exact_programs, planted_programs, sample
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex_conformance.examples.spellings import MAKERS, spelling_example

Example = Callable[[int], str]
"""From a seed to what is wrong with its example; empty when nothing is."""

_RULE = "add_rms_norm_dynamic_quant"


def programs(make: Callable[[], Maker], route: str) -> Example:
    """Examples that the oracle checks along ``route``; ``make`` is called for the first of them."""
    made: Callable[[], Maker] = cache(make)

    def example(seed: int) -> str:
        outcome = check(Case.of(sample(made(), seed), route=route))
        return outcome.failures[0] if outcome.failures else ""

    return example


def _streams(seed: int) -> str:
    from npugraph_ex_conformance.examples.streams import stream_example

    return stream_example(seed)


def _stream_graphs(seed: int) -> str:
    from npugraph_ex_conformance.examples.stream_graphs import stream_graph_example

    return stream_graph_example(seed)


def _device_programs(seed: int) -> str:
    from npugraph_ex_conformance.examples.device_programs import device_program_example

    return device_program_example(seed)


def _device_settings(seed: int) -> str:
    from npugraph_ex_conformance.examples.device_settings import device_setting_example

    return device_setting_example(seed)


def _pytest_projects(seed: int) -> str:
    from npugraph_ex_conformance.examples.pytest_projects import pytest_project_example

    return pytest_project_example(seed)


def _parts(seed: int) -> str:
    from npugraph_ex_conformance.examples.parts import part_example

    return part_example(seed)


def _racy_parts(seed: int) -> str:
    from npugraph_ex_conformance.examples.parts import racy_part_example

    return racy_part_example(seed)


def _side_streams(seed: int) -> str:
    from npugraph_ex_conformance.examples.side_streams import side_stream_example

    return side_stream_example(seed)


def _forms(seed: int) -> str:
    from npugraph_ex_conformance.examples.stream_forms import form_example

    return form_example(seed)


def _updates(seed: int) -> str:
    """Attention over a cache, whose lengths are host arguments of a captured graph, against eager mode.

    With an odd ``seed`` the cache has two sizes in turn, so that there are two graphs.
    """
    generator = torch.Generator().manual_seed(seed)

    def attend(query: torch.Tensor, cache: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        found: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
            query * 2, cache, cache, input_layout="BSH", num_heads=2, scale=0.5, actual_seq_lengths_kv=lengths
        )[0]
        return found + query

    torch.compiler.reset()
    # Where it is not captured, its numbers are right and nothing is updated.
    compiled = torch.compile(
        attend, backend="npugraph_ex", options={"require_capture": True}, dynamic=True, fullgraph=True
    )
    for call in range(4):
        lengths = torch.randint(1, 7, (2,), generator=generator).tolist()
        sizes = (1, 9 if seed * call % 2 else 6)
        query, cache = (torch.randn(2, rows, 8, generator=generator).to("npu", torch.float16) for rows in sizes)
        try:
            with torch.no_grad():
                actual = compiled(query, cache, lengths)
        except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
            return f"raised {type(error).__name__}: {error}"
        if not torch.equal(actual.cpu(), attend(query, cache, lengths).cpu()):
            return f"replay, call {call}: another result than eager mode for lengths {lengths}"
    return ""


def _events(seed: int) -> str:
    from npugraph_ex_conformance.examples.events import event_example

    return event_example(seed)


def _random_numbers(seed: int) -> str:
    from npugraph_ex_conformance.examples.random_numbers import random_number_example

    return random_number_example(seed)


def _cache(seed: int) -> str:
    from npugraph_ex_conformance.examples.caches import cache_example

    return cache_example(seed)


def _saved_graphs(seed: int) -> str:
    from npugraph_ex_conformance.examples.saved_graphs import saved_graph_example

    return saved_graph_example(seed)


def _user_rules(seed: int) -> str:
    from npugraph_ex_conformance.examples.user_rules import user_rule_example

    return user_rule_example(seed)


def _literals(seed: int) -> str:
    from npugraph_ex_conformance.examples.literals import literal_example

    return literal_example(seed)


def _shared_pool(seed: int) -> str:
    from npugraph_ex_conformance.examples.shared_pools import shared_pool_example

    return shared_pool_example(seed)


def _callers(seed: int) -> str:
    from npugraph_ex_conformance.examples.callers import caller_example

    return caller_example(seed)


def _static_kernels(seed: int) -> str:
    from npugraph_ex_conformance.examples.static_kernels import static_kernel_example

    return static_kernel_example(seed)


def _undeclared_effects(seed: int) -> str:
    from npugraph_ex_conformance.examples.undeclared_effects import undeclared_effect_example

    return undeclared_effect_example(seed)


def _wrong_passes(seed: int) -> str:
    from npugraph_ex_conformance.examples.wrong_passes import wrong_pass_example

    return wrong_pass_example(seed)


def _idioms(seed: int) -> str:
    from npugraph_ex_conformance.examples.idioms import idiom_example

    return idiom_example(seed)


def _joined(seed: int) -> str:
    from npugraph_ex_conformance.examples.joined_parameters import joined_example

    return joined_example(seed)


def _collectives(seed: int) -> str:
    from npugraph_ex_conformance.examples.collectives import collective_example

    return collective_example(seed)


def _nested_regions(seed: int) -> str:
    from npugraph_ex_conformance.examples.nested_regions import nested_region_example

    return nested_region_example(seed)


def _ranks(seed: int) -> str:
    from npugraph_ex_conformance.examples.ranks import rank_example

    return rank_example(seed)


SPELLED: Mapping[str, Example] = {
    f"spelled {form.removeprefix('lift_')}": partial(spelling_example, form=form) for form in MAKERS
}
"""Those of "spellings" by form: what is wrong with one form is found sooner among its own."""


def _in_turn(seed: int) -> str:
    """Of each form in turn, so that few examples have some of every form."""
    forms = [*SPELLED.values()]
    return forms[seed % len(forms)](seed // len(forms))


FAMILIES: Mapping[str, Example] = MappingProxyType(
    {
        "planted": programs(partial(planted_programs, pattern=_RULE), "fx"),
        "near-miss muls_add": programs(partial(planted_programs, pattern="muls_add", near_miss=True), "fx"),
        "near-miss transposed product": programs(
            partial(planted_programs, pattern="transpose_batchmatmul", near_miss=True), "fx"
        ),
        "near-miss": programs(partial(planted_programs, pattern=_RULE, near_miss=True), "fx"),
        "exact": programs(exact_programs, "fx"),
        "device": programs(partial(exact_programs, dynamic=False), "graph"),
        "device dynamic": programs(partial(exact_programs, dynamic=True), "graph"),
        "spellings": spelling_example,
        "spellings in turn": _in_turn,
        **SPELLED,
        "joined parameters": _joined,
        "streams": _streams,
        "stream graphs": _stream_graphs,
        "device programs": _device_programs,
        "device settings": _device_settings,
        "pytest projects": _pytest_projects,
        "parts": _parts,
        "racy parts": _racy_parts,
        "side streams": _side_streams,
        "forms": _forms,
        "events": _events,
        "random numbers": _random_numbers,
        "updates": _updates,
        "cache": _cache,
        "saved graphs": _saved_graphs,
        "user rules": _user_rules,
        "wrong passes": _wrong_passes,
        "literals": _literals,
        "shared pool": _shared_pool,
        "callers": _callers,
        "idioms": _idioms,
        "nested regions": _nested_regions,
        "undeclared effects": _undeclared_effects,
        "static kernels": _static_kernels,
        "collectives": _collectives,
        "ranks": _ranks,
    }
)
"""By name. "updates", "random numbers", "cache", "saved graphs", "shared pool", "callers", "idioms", "nested regions",
"undeclared effects" and "device ..." need a device; "streams", "stream graphs", "device programs", "static kernels", "parts",
"racy parts", "side streams", "forms", "pytest projects" and "ranks" want the emulated one; "device settings" are about it and need
none."""
