"""The forms that lifting knows, one a module, in the order in which they are tried: an operator may be part of a later form.

`upcast` is a short form to read first. A module with an underscore reads a part that several forms share.
"""

from __future__ import annotations

from npugraph_ex.lifting.forms import (
    activation,
    add_norm,
    attention,
    bias,
    cache_writes,
    cross_entropy,
    dynamic_quant,
    gating,
    group_norm_silu,
    layer_norm,
    norm_rope_cache,
    product_activation,
    quant_matmul,
    rms_norm,
    rotary,
    scaled_sum,
    sigmoid_gating,
    softmax,
    softmax_attention,
    swiglu,
    upcast,
    weight_quant,
)
from npugraph_ex.lifting.proposal import Form

FORMS: tuple[Form, ...] = (
    softmax.FORM,
    upcast.FORM,
    layer_norm.FORM,
    rms_norm.FORM,
    add_norm.RMS_NORM,
    add_norm.LAYER_NORM,
    rotary.FORM,
    softmax_attention.FORM,
    attention.SHARED_HEADS,
    attention.LAYOUT,
    activation.FORM,
    swiglu.SWIGLU,
    swiglu.GEGLU,
    gating.FORM,
    sigmoid_gating.FORM,
    group_norm_silu.FORM,
    cross_entropy.FORM,
    dynamic_quant.FORM,
    quant_matmul.FORM,
    weight_quant.FORM,
    norm_rope_cache.FORM,
    cache_writes.FORM,
    bias.FORM,
    product_activation.FORM,
    scaled_sum.FORM,
)
