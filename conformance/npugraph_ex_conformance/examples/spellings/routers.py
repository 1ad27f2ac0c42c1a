"""Routers, which choose experts, and losses over classes."""

from __future__ import annotations

import random

from npugraph_ex_conformance.examples.spellings.spelling import Spelling


def router(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """The result does not show which of equal experts is chosen."""
    experts, k = draw.choice((4, 8)), draw.choice((2, 3))
    miss = draw.choice(("over", "sum", "rank", "smallest", "twice", "mask", "max")) if wrong else ""
    behind = miss == "twice" or (miss not in {"over", "sum", "mask", "max"} and draw.random() < 0.3)
    over = 0 if miss == "over" else draw.choice((1, -1))
    softmax = draw.choice((f"torch.softmax(x0.float(), {over})", f"torch.softmax(x0, {over}, dtype=torch.float32)"))
    scores = "x0.float()" if behind and miss != "twice" else softmax
    scores = f"{scores}.masked_fill(x1 > 0, 0.0)" if miss == "mask" else scores
    ranked = "(scores * x1)" if miss == "rank" else "scores"
    largest = ", largest=False" if miss == "smallest" else ""
    gathered = draw.choice(("chosen[0]", "scores.gather(-1, chosen[1])", "scores.gather(1, chosen[1])"))
    # What is gathered in a near-miss may be a router by itself, without what is wrong.
    weights = (
        "scores.gather(-1, chosen[1])" if miss == "rank" else "chosen[0]" if miss in {"sum", "twice"} else gathered
    )
    total = (
        "weights.sum(0)"
        if miss == "sum"
        else draw.choice(("weights.sum(-1, keepdim=True)", "weights.sum(-1).unsqueeze(-1)"))
    )
    shared = draw.choice((f"weights / {total}", f"(1 / {total}) * weights", f"weights / ({total} + 1e-20)"))
    end = (
        "torch.softmax(weights, -1)"
        if behind
        else shared
        if miss == "sum"
        else draw.choice(("weights", shared, shared))
    )
    topk = (f"chosen = torch.topk({ranked}, {k}, dim={draw.choice((1, -1))}{largest})",)
    order = f"order = {ranked}.sort(dim=-1, descending={miss != 'smallest'})"
    sort = (order, f"chosen = order[0][:, :{k}], order[1][..., :{k}]")
    one = (f"chosen = [one.unsqueeze(-1) for one in scores.max(dim={draw.choice((1, -1))})]",)
    weights, end = ("chosen[0]", "weights") if miss == "max" else (weights, end)
    lines = (
        f"scores = {scores}",
        *(one if miss == "max" else draw.choice((topk, topk, sort))),
        f"weights = {weights}",
        f"({end}).to(x0.dtype) * x0.gather(-1, chosen[1])",
    )
    told = miss in {"mask", "max"}
    return Spelling("lift_gating", lines, ((rows, experts), (experts,)), miss, alone=end != shared, told=told)


def sigmoid_router(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """As above: weights by a sigmoid, a choice with a bias, and in groups."""
    groups, of_each, k = draw.choice((1, 2, 4)), draw.choice((4, 8)), draw.choice((2, 3))
    experts = groups * of_each
    miss = draw.choice(("share", "bias", *(("fill", "groups", "worst") if groups > 1 else ()))) if wrong else ""
    biased = draw.choice(("scores + x1", "x1 + scores"))
    choice = "scores * x1" if miss == "bias" else biased if miss or draw.random() < 0.8 else "scores"
    lines = ["scores = torch.sigmoid(x0.float())", f"choice = {choice}"]
    if groups > 1:
        two = 3 if miss == "groups" else 2
        of_two = f"choice.view(-1, {groups}, {of_each}).topk({two}, dim=-1)[0].sum(-1)"
        best = draw.choice((of_two, f"choice.view(-1, {groups}, {of_each}).amax(-1)")) if miss != "groups" else of_two
        masks = (
            f"kept.unsqueeze(-1).expand(-1, {groups}, {of_each}).reshape(-1, {experts}).bool()",
            f"kept.bool().repeat_interleave({of_each}, 1)",
        )
        fill = "0.0" if miss == "fill" else "-torch.inf"
        worst = ", largest=False" if miss == "worst" else ""
        lines += [
            f"best = {best}",
            f"kept = torch.zeros_like(best).scatter_(1, torch.topk(best, {groups // 2}, sorted=False{worst})[1], 1)",
            f"mask = {draw.choice(masks)}",
            f"ranked = {draw.choice((f'choice.masked_fill(~mask, {fill})', f'torch.where(mask, choice, {fill})'))}",
        ]
    ranked = "ranked" if groups > 1 else "choice"
    total = draw.choice(("weights.sum(-1, keepdim=True)", "weights.sum(-1).unsqueeze(-1)"))
    over = draw.choice((total, f"({total} + 1e-20)", f"({total} + 0.01)"))
    end = "weights" if miss == "share" else draw.choice((f"weights / {over}", f"weights * (2.5 / {over})"))
    lines += [
        f"places = torch.topk({ranked}, {k}, dim=-1, sorted=False).indices",
        "weights = scores.gather(-1, places)",
        # Which place an expert has is not said by the program, so the sum alone shows it.
        f"(({end}) * x0.gather(-1, places)).sum(-1).to(x0.dtype)",
    ]
    return Spelling("lift_sigmoid_gating", tuple(lines), ((rows, experts), (experts,)), miss, alone=True)


def loss(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Torch's own, or the logarithms of the classes, chosen by `gather`."""
    return draw.choice((_chosen_logarithms, _loss, _loss_of_positions))(draw, rows, wrong)


def _chosen_logarithms(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """The logarithm of each row's probability of a class, with a minus before or behind what is done with them."""
    classes = draw.choice((4, 8))
    miss = draw.choice(("over", "difference", "logarithm", "ones", "several", "rows")) if wrong else ""
    softmax = {
        "over": "torch.log_softmax(logits, 0)", "logarithm": "torch.softmax(logits, -1).log()", "difference": "logits",
    }.get(miss, draw.choice(("torch.log_softmax(logits, -1)", "logits.log_softmax(dim=1)")))  # fmt: skip
    place = draw.choice(("x1.argmax(-1, keepdim=True)", "x1.argmax(-1)[:, None]", "x1.argmax(1).view(-1, 1)"))
    place = "x1.argsort(-1)[:, :2]" if miss == "several" else place
    one = draw.choice((".squeeze(1)", "[:, 0]", "")) if miss not in {"several", "difference"} else ""
    chosen = f"{softmax}.gather({draw.choice((1, -1))}, {place}){one}"
    if miss == "rows":
        chosen = f"{softmax}[torch.arange(x0.shape[0], device=x0.device), x1.argmax(-1)]"
    if miss == "ones":
        chosen = f"({softmax} * torch.nn.functional.one_hot(x1.argmax(-1), {classes})).sum(-1)"
    if miss == "difference":
        chosen = f"({chosen} - torch.logsumexp(logits, -1, keepdim=True))"
    end = draw.choice((f"-{chosen}", f"-{chosen}.mean()", f"-({chosen}).sum()", f"(-{chosen}).mean()"))
    lines = (f"logits = {draw.choice(('x0.float()', 'x0'))}", end)
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, classes), (rows, classes))
    return Spelling("lift_cross_entropy", lines, shapes, miss, told=miss not in {"", "several"})


def _loss(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Classes come from another input, and one of them may be ignored."""
    classes, ignored = draw.choice((4, 8)), draw.choice((-100, 1))
    miss = draw.choice(("over", "logarithm")) if wrong else ""
    reduction = draw.choice(("mean", "sum", "none"))
    rest = f"x1.argmax(-1), reduction='{reduction}', ignore_index={ignored}"
    logits = draw.choice(("x0.float()", "x0"))
    softmax = "torch.log_softmax(logits, 0)" if miss == "over" else "torch.log_softmax(logits, -1)"
    spelled = "torch.softmax(logits, -1).log()" if miss == "logarithm" else softmax
    ends = [f"torch.nn.functional.nll_loss({spelled}, {rest})"]
    ends += [] if miss else [f"torch.nn.functional.cross_entropy(logits, {rest})"]
    shapes: tuple[tuple[int | str, ...], ...] = ((rows, classes), (rows, classes))
    return Spelling("lift_cross_entropy", (f"logits = {logits}", draw.choice(ends)), shapes, miss)


def _loss_of_positions(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Logits [B, L, C] whose classes change places with positions, as torch's loss wants them; classes that are first by nature."""
    classes, positions, ignored = draw.choice((4, 8)), 3, draw.choice((-100, 1))
    miss = draw.choice(("first", "logarithm")) if wrong else ""
    turned = (
        "logits" if miss == "first" else draw.choice(("logits.transpose(1, 2)", "logits.permute(0, 2, 1).contiguous()"))
    )
    spelled = f"torch.softmax({turned}, 1).log()" if miss == "logarithm" else f"torch.log_softmax({turned}, 1)"
    rest = f"x1.argmax({1 if miss == 'first' else -1}), reduction='{draw.choice(('mean', 'sum', 'none'))}', ignore_index={ignored}"
    ends = [f"torch.nn.functional.nll_loss({spelled}, {rest})"]
    ends += [] if miss else [f"torch.nn.functional.cross_entropy({turned}, {rest})"]
    shape = (rows, classes, positions) if miss == "first" else (rows, positions, classes)
    lines = (f"logits = {draw.choice(('x0.float()', 'x0'))}", draw.choice(ends))
    return Spelling("lift_cross_entropy", lines, (shape, shape), miss, told=bool(miss))
