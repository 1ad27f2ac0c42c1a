"""Every way by which a kernel could read memory in FRACTAL_NZ: the elements are right, or the call is refused at once."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu

import npu_emulator

VALUES = torch.randn(2, 32, 64).half()
REFUSED = r"FRACTAL_NZ, through a view of shape"
Way = Callable[[torch.Tensor], torch.Tensor]


def _over(x: torch.Tensor, *geometry: object) -> torch.Tensor:
    """A tensor over the storage of another one."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), *geometry)


def _from_host(x: torch.Tensor) -> torch.Tensor:
    """The storage, brought to the host and back."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().cpu(), 0, (2, 32, 64), (2048, 64, 1)).npu()


def _loaded(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _given_to(x: torch.Tensor) -> torch.Tensor:
    target = torch.zeros_like(x[:1])
    target.data = x[:1]
    return target


SHOWN_AS_IT_LIES: dict[str, Way] = {
    "fractals of one": lambda x: x[1].view(4, 2, 16, 16), "flat": lambda x: x.view(-1), "halves": lambda x: x.view(4, 16, 64),
    "wide": lambda x: x.view(2, 16, 128), "rows": lambda x: x[:, 16:], "columns": lambda x: x[..., :32],
    "every other": lambda x: x[:, ::2], "a row": lambda x: x[1, 3], "split": lambda x: x.split(16, 1)[1],
    "chunk": lambda x: x.chunk(2, -1)[0], "narrow": lambda x: x.narrow(1, 8, 8), "unfold": lambda x: x.unfold(1, 16, 16),
    "diagonal": lambda x: x[0].diagonal(), "strides": lambda x: x.as_strided((16, 16), (64, 1)), "rows of a detached one":
    lambda x: x.detach()[:, :16], "reshaped": lambda x: x.reshape(2, -1), "moved": lambda x: x.view(2, 2, 16, 64).movedim(1, 2),
    "rows as bytes": lambda x: x[:, :16].view(torch.int16), "storage": lambda x: _over(x, 0, (32, 128), (128, 1)),
}  # fmt: skip
"""Views that split, join or cut the matrices: ATen's operators bring them to plain order first, others would not."""
WHOLE: dict[str, Way] = {
    "itself": lambda x: x, "one matrix": lambda x: x[1], "transposed": lambda x: x.mT,
    "one transposed": lambda x: x[1:].squeeze(0).t(),
    "more dimensions": lambda x: x.unsqueeze(1), "expanded": lambda x: x[:1].expand(3, 32, 64),
    "int32": lambda x: x.view(torch.int32),
    "detached": lambda x: x.detach(),
    "parameter": torch.nn.Parameter, "deep copy": copy.deepcopy, "saved": _loaded,
    "rows saved": lambda x: _loaded(x[:, :16]), "data": _given_to, "storage": lambda x: _over(x, 0, (2, 32, 64), (2048, 64, 1)),
    "clone": lambda x: x[:, 16:].clone(), "like": lambda x: torch.empty_like(x).copy_(x),
    "new": lambda x: x.new_empty(2, 16, 64).copy_(x[:, :16]), "host": lambda x: x[:, :16].cpu().npu(),
    "storage on the host": _from_host, "other strides": lambda x: x.mT.contiguous(),
    "resized": lambda x: x.resize_(32, 128), "resized smaller": lambda x: x.resize_(8, 8),
    "joined": lambda x: torch.cat([x[:, :16], x[:, 16:]], -1),
}  # fmt: skip
"""Whole matrices, and what is in plain order again."""


@pytest.fixture(autouse=True)
def _private_formats() -> Iterator[None]:
    torch_npu.npu.config.allow_internal_format = True
    yield
    torch_npu.npu.config.allow_internal_format = False


def nz(values: torch.Tensor = VALUES) -> torch.Tensor:
    """The values in FRACTAL_NZ on the device."""
    return torch_npu.npu_format_cast(values.npu(), 29)


def an_operator(x: torch.Tensor) -> torch.Tensor:
    """One outside ATen."""
    return torch_npu.npu_dtype_cast(x, torch.float32)


def test_views_that_would_show_the_fractals_order_are_refused() -> None:
    """By an operator outside ATen, in eager mode; ATen's have the right elements."""
    for name, way in SHOWN_AS_IT_LIES.items():
        view = way(nz())
        assert torch.equal(view.cpu(), way(VALUES.clone())), name
        assert torch.equal((view + 1).cpu(), way(VALUES.clone()) + 1), name
        with pytest.raises(RuntimeError, match=REFUSED):
            an_operator(view)
    padded = nz(torch.randn(3, 20, 8).half())
    with pytest.raises(RuntimeError, match=REFUSED):
        an_operator(padded[1:])


def test_a_view_in_the_fractals_sizes_shows_their_order() -> None:
    """Rows of 32 bytes, 16 of them a fractal, fractals below each other first; in eager mode and compiled. None is written."""
    compiled = torch.compile(lambda x: an_operator(x.view(2, 4, 2, 16, 16)) + 0, backend="npugraph_ex", dynamic=False)
    expected = torch.stack([VALUES[:, :, i : i + 16].reshape(2, 2, 16, 16) for i in range(0, 64, 16)], 1).float()
    assert torch.equal(an_operator(nz().view(2, 4, 2, 16, 16)).cpu(), expected)
    for _ in range(2):
        assert torch.equal(compiled(nz()).cpu(), expected)
    whole = torch.arange(2048, dtype=torch.int8).reshape(32, 64)
    of_bytes = nz(whole).view(torch.int32).view(2, 2, 16, 8)
    assert an_operator(of_bytes)[1, 1, 3, 0].item() == whole[19, 32:36].view(torch.int32).item()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch_npu.npu_dtype_cast_(nz().view(2, 4, 2, 16, 16), torch.ones(2, 4, 2, 16, 16).npu())


def test_all_other_ways_have_the_right_elements() -> None:
    """Of ATen's operators and of others."""
    for name, way in WHOLE.items():
        expected, found = way(VALUES.clone()), way(nz())
        assert torch.equal(found.cpu(), expected.cpu()), name
        assert torch.equal(an_operator(found).cpu(), expected.float().cpu()), name
    padded = torch.randn(3, 20, 8).half()
    assert torch.equal(an_operator(nz(padded)).cpu(), padded.float())
    assert torch.equal(an_operator(nz(padded)[:1]).cpu(), padded[:1].float())


def test_a_programs_own_operator_reads_memory_as_it_lies_too() -> None:
    """Whatever its namespace."""
    torch.library.define("formats::twice", "(Tensor x) -> Tensor")
    npu_emulator.register_kernel("formats::twice", lambda x: x * 2)
    assert torch.equal(torch.ops.formats.twice(nz()).cpu(), VALUES * 2)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.ops.formats.twice(nz()[:, 16:])


def test_an_address_without_its_format_is_not_given_away() -> None:
    """DLPack names shape and strides alone; torch_npu itself refuses to share such memory with another process."""
    for give in (torch.from_dlpack, torch.utils.dlpack.to_dlpack, torch.Tensor.__dlpack__):
        with pytest.raises(RuntimeError, match="DLPack has no word for the memory format"):
            give(nz())
    assert torch.equal(torch.from_dlpack(VALUES.npu()).cpu(), VALUES)
    with pytest.raises(RuntimeError, match="without base format"):
        nz().untyped_storage()._share_npu_()


@pytest.mark.parametrize("stable", [True, False])
def test_compiled_code_refuses_what_eager_mode_refuses_from_the_first_call_on(stable: bool) -> None:
    """An input's copy has the input's format, so that its kernels are those of eager mode, whichever call it is."""
    options = {"stable_inputs_in_place": stable}

    def compiled(function: Way) -> Way:
        return torch.compile(function, backend="npugraph_ex", options=options, dynamic=False)

    rows, whole = compiled(lambda x: an_operator(x[:, 16:]) + 1), compiled(lambda x: an_operator(x) + x)
    given = compiled(lambda x: an_operator(x) + 1)
    same, expected = nz(), VALUES.float() + VALUES
    for call in range(10 if stable else 3):
        for view, function in ((same, rows), (same[:, 16:], given)):
            with pytest.raises(RuntimeError, match=REFUSED):
                function(view)
        assert torch.equal(whole(same).cpu(), expected), call
    another = VALUES.flip(0)
    assert torch.equal(whole(nz(another)).cpu(), another.float() + another)


def test_a_copied_input_keeps_its_format() -> None:
    """Padding, a cut view and the values come with it; another input of the graph stays in plain order."""
    from npugraph_ex.aclgraph.inputs import Buffer, InputMemory

    values = torch.randn(3, 20, 8).half()
    for given in (nz(values), nz(values)[1], nz()[:, 16:], VALUES.npu()):
        buffer = Buffer(given, InputMemory().at(0)).tensor
        assert buffer.data_ptr() != given.data_ptr()
        assert torch_npu.get_npu_format(buffer) == torch_npu.get_npu_format(given)
        assert buffer.untyped_storage().nbytes() == given.untyped_storage().nbytes()
        assert (buffer.stride(), buffer.storage_offset()) == (given.stride(), given.storage_offset())
        assert torch.equal(buffer.cpu(), given.cpu())
