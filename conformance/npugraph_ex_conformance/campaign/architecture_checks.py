"""Architectures of transformers as a kind of items: calls, generated text and steps of training, compiled against eager mode.

Text that a lifted decoder generates is compared by tokens: they may differ only where eager mode's two largest logits are nearer
to each other than its own distance from float64 allows to tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from npugraph_ex.errors import SessionError
from npugraph_ex.inference import session
from npugraph_ex_conformance.campaign.strangers import unlike
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer
from npugraph_ex_conformance.models.architectures import ARCHITECTURES, DecodeStep, drawn, make

_CALLS, _NEW_TOKENS, _STEPS = 3, 6, 2
LIFTED = "generate lifted"


class ArchitectureCase(NamedTuple):
    """One item: an architecture, and what is done with it: "forward", "session", "generate", "train" or "generate lifted"."""

    architecture: str
    use: str


def architecture_cases(_settings: CampaignSettings) -> list[ArchitectureCase]:
    """Every architecture in each of its uses."""
    return [ArchitectureCase(name, use) for name in ARCHITECTURES for use in (*_USES, LIFTED)]


def check_architecture(_settings: CampaignSettings, case: ArchitectureCase) -> ItemAnswer:
    """The results and what was written: those of eager mode to the bit, or else those of `aot_eager`."""
    label = f"{case.architecture}: {case.use}"
    if case.use == LIFTED:
        return _check_lifted_generation(case.architecture, label)
    run = _USES[case.use]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        eager = run(case.architecture, None)
        if eager is None:
            return ItemAnswer(label=label, skipped="the architecture has no such use")
        try:
            ours = run(case.architecture, "npugraph_ex")
        except SessionError as error:
            if "the device refused to capture" not in str(error):
                raise
            return ItemAnswer(label=label, skipped="the device cannot capture it")
        torch.compiler.reset()
        found = unlike(eager, ours)
        if found and unlike(run(case.architecture, "aot_eager"), ours):
            return ItemAnswer(found, label=label)
    torch.compiler.reset()
    return ItemAnswer(features=[f"ran {label}"], label=label, value={"upstream": [found] if found else []})


def _forward(name: str, backend: str | None, *, by_session: bool = False) -> Any:
    """Three calls with inputs of their own."""
    model, inputs = make(name, torch.float32, "npu")
    with torch.no_grad():
        model.prepare()
        called = torch.compile(model, backend=backend) if backend else model
        if by_session and backend == "npugraph_ex":
            called = session(model, inputs)
        others = [
            [value.to(old) for value, old in zip(drawn(inputs, seed), inputs, strict=True)] for seed in range(_CALLS)
        ]
        return [called(*values).clone() for values in others], model.written()


def _generate(name: str, backend: str | None) -> Any:
    """Six more tokens, by `transformers`' own loop; the growing cache makes sizes symbolic."""
    model, inputs = make(name, torch.float32, "npu")
    inner: Any = model.model
    if isinstance(model, DecodeStep) or not getattr(inner, "can_generate", bool)():
        return None
    if backend:
        inner.forward = torch.compile(inner.forward, backend=backend)
    return inner.generate(inputs[0], max_new_tokens=_NEW_TOKENS, do_sample=False)


def _check_lifted_generation(name: str, label: str) -> ItemAnswer:
    """Tokens of a float16 decoder with ``lift="judged"`` beside eager mode's."""
    eager = generated(name, None)
    if eager is None:
        return ItemAnswer(label=label, skipped="the architecture has no such use")
    lifted = generated(name, {"lift": "judged"})
    torch.compiler.reset()
    assert lifted is not None
    return ItemAnswer(otherwise(name, eager, lifted), features=[f"ran {label}"], label=label, value={"upstream": []})


def generated(name: str, options: dict[str, Any] | None, **given: Any) -> Any:
    """What `generate` answers, with the logits of each step; None where the architecture cannot generate.

    Args:
        name: of the architecture.
        options: of the compiled decoder; None for eager mode.
        given: arguments of `generate`, in the place of six new tokens.
    """
    torch.compiler.reset()
    model, inputs = make(name, torch.float16, "npu")
    inner: Any = model.model
    if isinstance(model, DecodeStep) or not getattr(inner, "can_generate", bool)():
        return None
    if options is not None:
        inner.forward = torch.compile(inner.forward, backend="npugraph_ex", options=options)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        given = {"max_new_tokens": _NEW_TOKENS, **given}
        return inner.generate(inputs[0], do_sample=False, output_logits=True, return_dict_in_generate=True, **given)


def otherwise(name: str, eager: Any, lifted: Any) -> str:
    """The first step at which the tokens differ though eager mode's error does not reach from the largest logit to the next."""
    tokens, others = eager.sequences.cpu(), lifted.sequences.cpu()
    if torch.equal(tokens, others):
        return ""
    first = int((tokens != others)[0].nonzero()[0])
    gap, noise = (float(of[first - tokens.shape[1]]) for of in gaps(name, eager))
    said = f"token {first} is {int(others[0, first])}, in eager mode {int(tokens[0, first])}"
    return (
        f"{said}: its logit is {gap:.3g} above the next, and eager mode's error at most {noise / 2:.3g}"
        if gap > noise
        else ""
    )


def gaps(name: str, answer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """By step: how far the largest logit is above the next, and twice the largest distance of a logit from float64."""
    tokens, logits = answer.sequences.cpu(), torch.cat(answer.logits).cpu().double()
    model, _ = make(name, torch.float64, "cpu")
    with torch.no_grad():
        truth = model.model(input_ids=tokens[:, :-1], use_cache=False).logits[0, -len(logits) :]
    return -logits.topk(2)[0].diff()[:, 0], 2 * (logits - truth).abs().amax(-1)


def _train(name: str, backend: str | None) -> Any:
    """Two steps with dropout; losses, gradients of the second step, and weights after it."""
    model, inputs = make(name, torch.float32, "npu")
    if isinstance(model, DecodeStep):
        return None
    model.train()
    called = torch.compile(model, backend=backend) if backend else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    torch.npu.manual_seed(3)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = called(*inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = [*model.parameters()]
    return losses, [parameter.grad for parameter in parameters], [parameter.detach() for parameter in parameters]


_USES: Mapping[str, Callable[[str, str | None], Any]] = {
    "forward": _forward,
    "session": partial(_forward, by_session=True),
    "generate": _generate,
    "train": _train,
}
