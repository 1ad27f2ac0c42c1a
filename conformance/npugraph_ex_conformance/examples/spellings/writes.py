"""Writes into caches of keys and values."""

from __future__ import annotations

import random

from npugraph_ex_conformance.examples.spellings.spelling import ROWS, Spelling


def cache_writes(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Keys and values in slots of two paged caches; which slots is decided by another input."""
    heads, width, blocks, size = draw.choice((1, 2)), draw.choice((4, 16)), draw.choice((3, 5)), draw.choice((2, 4))
    miss = (
        draw.choice(("gaps", "gaps", "index", "count", "chain", "dimension", "elements", "negative")) if wrong else ""
    )
    heads, dim = (6, 1) if miss == "dimension" else (2 if miss == "elements" else heads, 0)
    flat = draw.choice(("view({shape})", "reshape({shape})", "flatten(0, 1)")).format(shape=f"-1, {heads}, {width}")
    value = "x1.repeat_interleave(2, 0)[::2]" if miss == "gaps" else "x1"
    slots = {"index": "slots.flip(0)", "count": "slots[:1]"}.get(miss, "slots")
    value = "x1[:1]" if miss == "count" else value
    into = "keys.reshape(x3.shape)" if miss == "chain" else "x3"
    key = draw.choice(("x0", "x0 * 2"))
    by = draw.choice(("index_copy", "scatter", "scatter" if miss == "elements" else "each"))
    by = "index_put" if miss == "negative" else by
    elements = miss == "elements"
    lines = (
        f"slots = x4.argsort()[:{ROWS}]",
        f"keys = {_written(draw, f'x2.{flat}', dim, 'slots', key, by=by)}",
        f"values = {_written(draw, f'{into}.{flat}', dim, slots, value, by='scatter' if elements else by, elements=elements)}",
        draw.choice(("torch.cat((keys, values))", "keys - values", "keys.view(x2.shape) * values.view(x3.shape)")),
    )
    row, cache = (blocks * size, ROWS, width) if dim else (ROWS, heads, width), (blocks, size, heads, width)
    return Spelling(
        "lift_paged_cache",
        lines,
        (row, row, cache, cache, (heads if dim else blocks * size,)),
        miss,
        alone=True,
        told=miss == "negative",
    )


def _written(
    draw: random.Random, cache: str, dim: int, slots: str, rows: str, *, by: str, elements: bool = False
) -> str:  # fmt: skip
    """Rows in a cache, by one operator, or by ``each`` of the two; ``elements``: with a place of its own for each head."""
    if by == "index_put":  # which counts negative slots from the end
        return f"{cache}.index_put(({slots},), {rows})"
    if by == "index_copy" or (by == "each" and draw.random() < 0.5):
        return f"{cache}.index_copy({dim}, {slots}, {rows})"
    places = f"{slots}.view({'1, -1, 1' if dim else '-1, 1, 1'})"
    places = f"torch.stack(({slots}, {slots}.flip(0)), 1)[..., None]" if elements else places
    return f"{cache}.scatter({dim}, {places}.expand(({rows}).shape), {rows})"


def latent_writes(draw: random.Random, rows: int | str, wrong: bool) -> Spelling:
    """Norm and rotary embedding of compressed keys and values, at positions of two caches."""
    miss = draw.choice(("halves", "source", "order", "index")) if wrong else ""
    cuts = {"order": "kv[..., 64:], kv[..., :64]", "source": "(kv + 1)[..., :512], kv[..., 512:]"}
    cut = cuts.get(miss, draw.choice(("kv[..., :512], kv[..., 512:]", "kv.split((512, 64), -1)")))
    pairs = draw.choice(
        ("k.view(1, 3, 32, 2).transpose(3, 2).reshape(1, 1, 3, 64)", "k.unflatten(-1, (32, 2)).mT.flatten(-2)[:, None]")
    )
    writes = [
        f"keys = x4.index_copy(2, {'places.flip(0)' if miss == 'index' else 'places'}, embedded)",
        "latents = x5.index_copy(1, places, normed)",
    ]
    draw.shuffle(writes)
    lines = (
        "kv = x0 * 1.5",
        f"c, k = {cut}",
        "normed = x1 * (c.float() * torch.rsqrt(c.float().pow(2).mean(-1, True) + 1e-6)).to(x0.dtype)",
        f"turned = {'k[:, None]' if miss == 'halves' else pairs}",
        "embedded = turned * x2 + torch.cat((-turned[..., 32:], turned[..., :32]), -1) * x3",
        "places = x6.argsort()[:3]",
        *writes,
        draw.choice(("torch.cat((keys[:, 0], latents), -1)", "keys[:, 0].sum(-1) + latents.sum(-1)")),
    )
    shapes = ((1, 3, 576), (512,), (1, 1, 3, 64), (1, 1, 3, 64), (1, 1, 7, 64), (1, 7, 512), (7,))
    return Spelling("lift_norm_rope_cache", lines, shapes, miss, alone=True)
