"""Examples for lifting: norms, rotary embeddings, activations, attention, masks, quantisation and others, spelled at random.

Each part of a spelling is drawn from the ways in which programs write it. One example in three is a near-miss: one part is
wrong in a way that changes what is computed. A spelling must be lifted, or be refused because the operator is a little farther
from float64. A near-miss must be refused by its form, with a reason where programs are often written so. Were it the judge who
refuses, or did he find an operator far from the values of a spelling, then no value would be wrong, and yet the form would read
something else than is there.
Either way the program computes what it did, in eager mode and by the oracle's judge.
One example in three is lifted with ``exact``: then no bit may differ from eager mode, in norms of many rows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from unittest import mock

import torch

from npugraph_ex.lifting import judging
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex_conformance.examples.spellings import attention, elementwise, norms, products, routers, writes
from npugraph_ex_conformance.examples.spellings.spelling import ROWS, Spelling

_FARTHER = re.compile(r"farther from float64 than eager mode: .* nine elements in ten are within (\S+)")
_REFUSED = ("farther from float64", "infinite or NaN")
"""What the judge says of a spelling that the operator would be worse than."""
_OF_BITS = ("elements are not eager mode's", "no documented order", "may not round where")
"""What he says where every bit counts."""
_OF_THE_JUDGE = (*_REFUSED, *_OF_BITS, "it cannot be judged")
_AS_NEAR = {"float16": 256.0, "bfloat16": 128.0, "float32": 4096.0}
"""In ulps: how far nine elements in ten may be from float64 where an operator computes what the spelling does. One element near
zero is far from it after any rounding of an operand, and alone makes the average large."""
_MANY_ROWS = 4096
"""A norm in float16 that is nearly exact differs from eager mode in one element of 10,000, so it is judged with few rows."""
_OF_16_BITS = (
    "lift_attention", "lift_shared_heads", "lift_attention_layout", "lift_gating", "lift_sigmoid_gating", "lift_dynamic_quant",
    "lift_quant_matmul", "lift_weight_quant", "lift_norm_rope_cache",
    "lift_upcast", "lift_product_activation",
)  # fmt: skip
_DTYPES = ("float16", "bfloat16", "float32")
_TAKEN = {**dict.fromkeys(_OF_16_BITS, _DTYPES[:2]), "lift_scaled_sum": ("float16", "float32")}
"""Forms that do not take all dtypes, or save nothing in some."""

MAKERS: dict[str, Callable[[random.Random, int | str, bool], Spelling]] = {
    "lift_layer_norm": norms.layer_norm,
    "lift_rms_norm": norms.norm, "lift_add_rms_norm": norms.rms_norm_of_a_sum, "lift_add_layer_norm": norms.norm_of_a_sum,
    "lift_rotary": attention.rotary, "lift_attention": attention.attended,
    "lift_shared_heads": attention.grouped_attention, "lift_attention_layout": attention.turned_attention,
    "lift_activation": elementwise.activation, "lift_upcast": elementwise.upcast, "lift_swiglu": elementwise.gated,
    "lift_geglu": elementwise.gelu_gated, "lift_gating": routers.router,
    "lift_sigmoid_gating": routers.sigmoid_router, "lift_group_norm_silu": norms.group_norm, "lift_cross_entropy": routers.loss,
    "lift_dynamic_quant": products.quantised, "lift_quant_matmul": products.product_of_whole_numbers,
    "lift_weight_quant": products.scaled_weight, "lift_norm_rope_cache": writes.latent_writes,
    "lift_paged_cache": writes.cache_writes, "lift_bias": products.biased,
    "lift_product_activation": products.activated, "lift_constants": elementwise.mask,
    "lift_scaled_sum": elementwise.scaled_sum, "lift_repeated": elementwise.twice,
    "lift_softmax": elementwise.softmax,
}  # fmt: skip
"""By form: what draws a spelling of it."""


def drawn(seed: int, name: str = "") -> tuple[Case, Spelling]:
    """The case of a seed, and its spelling; of one form, where ``name`` is given."""
    draw = random.Random(f"{name}:{seed}" if name else seed)
    dynamic, write = draw.random() < 0.25, draw.random() < 0.25
    lift = draw.choice(("judged", "judged", "exact"))
    some = MAKERS[name] if name else norms.norm
    form = some if name or (lift == "exact" and draw.random() < 1 / 2) else draw.choice((*MAKERS.values(),))
    nearly = lift == "exact" and form is norms.norm
    dynamic = dynamic or nearly
    spelling = form(draw, "s0" if dynamic else ROWS, draw.random() < 1 / 3)
    lines = [*spelling.lines[:-1], f"result = {spelling.lines[-1]}"]
    if write:
        lines.insert(draw.randint(1, len(lines)), "x0.mul_(0.5)")
    dtype = draw.choice(_DTYPES[:1] if nearly else _TAKEN.get(spelling.form, _DTYPES))
    inputs = tuple(
        Input(shape, dtype, scale=draw.choice((1.0, 1.0, 0.01)), seed=seed + position)
        for position, shape in enumerate(spelling.shapes)
    )
    names = ", ".join(f"x{position}" for position in range(len(inputs)))
    # What is computed on the way may have another user.
    on_the_way = [
        line.split(" = ")[0]
        for line in spelling.lines[:-1]
        if not re.search(r"torch\.topk|^(chosen|order|whole) = ", line)
    ]  # either is right
    also = draw.choice(on_the_way) if on_the_way and not spelling.alone and draw.random() < 0.3 else ""
    source = "\n    ".join([f"def program({names}):", *lines, f"return (result,{also})"]) + "\n"
    last = _MANY_ROWS if nearly else ROWS + 2
    sizes = ({"s0": ROWS}, {"s0": ROWS}, {"s0": last}) if dynamic else ({}, {}, {})
    options = {"lift": "judged", "every_row_attends": True} if spelling.declared else {"lift": lift}
    case = Case(
        source, inputs, sizes=sizes, dynamic=dynamic, functional=not (write or spelling.writes), options=options
    )
    return case, spelling


def spelling_example(seed: int, form: str = "") -> str:
    """What is wrong with one example, of one ``form`` where it is given; empty when nothing is."""
    case, spelling = drawn(seed, form)
    return fault_of(case, spelling, checked(case, spelling))


def checked(case: Case, spelling: Spelling) -> Outcome:
    """What comes of an example on the device that it names."""
    judging.forget()  # a ruling that is kept may be a mutant's
    if not spelling.device:
        return check(case)
    with mock.patch.object(torch.npu, "get_device_name", return_value=spelling.device):
        return check(case)


def fault_of(case: Case, spelling: Spelling, outcome: Outcome) -> str:
    """What is wrong with what came of an example; empty when nothing is."""
    exact = case.options["lift"] == "exact"
    if outcome.failures or outcome.report is None:
        return outcome.failures[0] if outcome.failures else "no report"
    if exact and outcome.worst_ulp + outcome.eager_ulp:
        return f"bits differ from eager mode, by {outcome.worst_ulp} and {outcome.eager_ulp} ulp:\n{case.source}"
    made = [
        by for record in outcome.report.rules if record.name == spelling.form for one in record.fusions for by in one.by
    ]
    lifted = any(name.startswith(spelling.by) for name in made)
    reasons = [miss.reason for miss in outcome.report.near_misses(spelling.form)]
    if spelling.near_miss:
        wrong = (lambda reason: _is_far(reason, case.inputs[0].dtype)) if spelling.by else judged
        read = "lifted" if lifted else next(filter(wrong, reasons), "")
        if read:
            return f"{read}, although the {spelling.near_miss} is wrong:\n{case.source}"
        silent = spelling.told and case.functional and not reasons
        return f"nothing is said of the {spelling.near_miss}:\n{case.source}" if silent else ""
    if lifted:
        return ""
    far = [reason for reason in reasons if not exact and _is_far(reason, case.inputs[0].dtype)]
    # A write in between may be a reason; which reasons there are is for the tests of each form.
    excuses = (*_REFUSED, *_OF_BITS) if exact else _REFUSED
    if far or (case.functional and not any(_says(reason, excuses) for reason in outcome.near_misses)):
        return f"missed: {'; '.join(far or reasons or outcome.near_misses) or 'nothing resembled the form'}:\n{case.source}"
    return ""


def refused(reason: str) -> bool:
    """Whether the judge found the operator worse than the spelling."""
    return _says(reason, _REFUSED)


def judged(reason: str) -> bool:
    """Whether a near-miss was read as the form, and refused by its values alone; not what another spelling would be refused by."""
    return " would launch " not in reason and _says(reason, _OF_THE_JUDGE)


def _says(reason: str, words: Iterable[str]) -> bool:
    return any(some in reason for some in words)


def _is_far(reason: str, dtype: str) -> bool:
    """Whether the judge found another function on ordinary inputs, and no rounding."""
    found = _FARTHER.search(reason) if "with ordinary inputs" in reason else None
    return found is not None and float(found[1]) > _AS_NEAR[dtype]
