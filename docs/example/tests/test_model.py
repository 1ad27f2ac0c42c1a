"""The model on the NPU, emulated or real."""

import pytest
import torch
from example_model import QuantisedNorm

import npugraph_ex


@pytest.fixture
def inputs(npu):
    """A batch of four rows and its residual."""
    torch.manual_seed(0)
    return [torch.randn(4, 128, dtype=torch.float16).to(npu) for _ in range(2)]


def test_eager_and_compiled_agree(npu, inputs):
    """The two operators are fused, and the results are those of eager mode; int8 may be one off at a tie."""
    model = QuantisedNorm(128).to(npu)
    fast = torch.compile(model, backend="npugraph_ex", options={"require_capture": True})
    with torch.inference_mode():
        expected, got = model(*inputs), fast(*inputs)
    npugraph_ex.last_report().require(1, "add_rms_norm_dynamic_quant")
    assert (expected[0].int() - got[0].int()).abs().max() <= 1
    torch.testing.assert_close(got[1:], expected[1:], rtol=2e-3, atol=0)


@pytest.mark.npu_schedule("lazy")
def test_streams_in_another_order(inputs):
    """Two streams, ordered by events: the values do not depend on the order that the device chooses."""
    x, residual = inputs
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        doubled = x * 2
    torch.npu.current_stream().wait_stream(side)
    torch.testing.assert_close((doubled + residual).cpu(), x.cpu() * 2 + residual.cpu())


@pytest.mark.npu_devices(2)
def test_two_devices():
    """Skipped unless `--npu-devices=2` is given."""
    assert torch.ones(2, device="npu:1").sum().item() == 2
