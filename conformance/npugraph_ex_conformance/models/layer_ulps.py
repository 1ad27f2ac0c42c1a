"""How far a decoder's hidden states are from a float64 run of the same weights, layer by layer, in ulps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.testing import ulp
from npugraph_ex_conformance.models.decoders import Decoded, random_decoder

HEADERS = ("layer", "eager, ulp from float64", "fused", "replayed", "fused from eager, worst")
UNIT = "Ulps: float16's, of a layer's root mean square, for nine tokens in ten."
_LUCK = 1.5
"""How much further from the reference than eager mode, in root mean square, a fused layer may be."""
_MOST_TOKENS = 0.9


def reference(family: str, prompt: torch.Tensor, tokens: torch.Tensor, *, layers: int) -> torch.Tensor:
    """Hidden states after each layer in float64, of `transformers`' own model: (calls, layers, batch, hidden)."""
    model, seen = random_decoder(family, layers=layers).double(), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, result: seen.append(result))
    with torch.no_grad():
        model(torch.cat([prompt.cpu(), tokens[:, :-1]], dim=1))
    return torch.stack(seen).permute(2, 0, 1, 3)


def _distance(hidden: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference of a token, for each layer, in float16 ulps of the layer's own root mean square.

    Of nine tokens in ten: a rounding may send one to other experts, after which nothing of it can be compared.
    """
    size = exact.double().square().mean((0, 2, 3)).sqrt()
    tokens = (hidden.double() - exact.double()).square().mean(3).sqrt().transpose(0, 1).flatten(1)
    return tokens.quantile(_MOST_TOKENS, dim=1) / ulp(size, torch.float16)


def _worst(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The largest difference of an element, for each layer, in the same unit."""
    size = other.double().square().mean((0, 2, 3)).sqrt()
    return (hidden.double() - other.double()).abs().amax((0, 2, 3)) / ulp(size, torch.float16)


def layer_table(
    exact: torch.Tensor, eager: Decoded, fused: Decoded, replayed: Decoded
) -> tuple[list[tuple[object, ...]], bool]:
    """A row for each layer under ``HEADERS``, and whether each fused layer is as close to float64 as eager mode is."""
    distances = [_distance(decoded.hidden, exact) for decoded in (eager, fused, replayed)]
    columns: Sequence[torch.Tensor] = [*distances, _worst(fused.hidden, eager.hidden)]
    rows = [(layer, *(f"{float(column[layer]):.2f}" for column in columns)) for layer in range(exact.shape[1])]
    return rows, bool((distances[1] <= _LUCK * distances[0]).all())
