import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skein.errors import LocalError
from skein.protocol.messages.tensors import Refusal
from skein.wire.extra import DType, TensorMeta
from worker.bundle import Limits, WireTensor, allocate, fault_of, split_tensors, to_torch, to_wire
from worker.transport.parts import outgoing

SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 3)]


def sample(dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(shape) % 2
    return values.to(getattr(torch, dtype))


def meta(*, name: str = "x", dtype: DType = DType.FLOAT32, shape: tuple[int, ...] = (2, 3)) -> TensorMeta:
    return TensorMeta(name=name, dtype=dtype, shape=shape)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_dtype_and_shape_comes_back_equal(dtype: DType, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    wire = to_wire("x", tensor)
    back = to_torch(wire)
    assert wire.meta == meta(dtype=dtype, shape=shape)
    assert len(wire.data) == wire.meta.num_bytes
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_bytes_are_those_of_the_memory_even_for_not_a_number() -> None:
    tensor = torch.tensor([math.nan, -0.0, math.inf, 1e-40], dtype=torch.float32)
    assert bytes(to_wire("x", tensor).data) == tensor.numpy().tobytes()
    assert to_torch(to_wire("x", tensor)).numpy().tobytes() == tensor.numpy().tobytes()


def test_a_contiguous_tensor_shares_its_memory_with_the_wire() -> None:
    tensor = torch.zeros(4)
    wire = to_wire("x", tensor)
    tensor[0] = 1.0
    assert to_torch(wire)[0] == 1.0


def test_a_transposed_tensor_travels_in_row_major_order() -> None:
    tensor = torch.arange(6).reshape(2, 3).t()
    assert torch.equal(to_torch(to_wire("x", tensor)), tensor)


def test_a_gradient_travels_without_its_graph() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    assert not to_torch(to_wire("x", tensor)).requires_grad


def test_a_tensor_made_of_read_only_bytes_may_be_written() -> None:
    wire = WireTensor(name="x", dtype=DType.INT8, shape=(2,), data=b"\x01\x02")
    tensor = to_torch(wire)
    tensor += 1
    assert tensor.tolist() == [2, 3]
    assert wire.data == b"\x01\x02"


def test_any_nonzero_byte_of_a_bool_is_true() -> None:
    tensor = to_torch(WireTensor(name="x", dtype=DType.BOOL, shape=(3,), data=b"\x00\x01\x07"))
    assert tensor.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_dtype_outside_the_allow_list_does_not_travel() -> None:
    with pytest.raises(LocalError, match="complex64"):
        to_wire("x", torch.zeros(1, dtype=torch.complex64))


def test_bytes_that_are_too_few_are_refused_before_torch_sees_them() -> None:
    with pytest.raises(LocalError, match="7 bytes"):
        to_torch(WireTensor(name="x", dtype=DType.FLOAT32, shape=(2,), data=bytes(7)))


def test_split_tensors_are_aligned_and_equal() -> None:
    tensors = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([0.5, -1.0], dtype=torch.float64)]
    wires = [to_wire(f"x{i}", tensor) for i, tensor in enumerate(tensors)]
    buffer = allocate(sum(len(wire.data) for wire in wires))
    buffer[:] = b"".join(part.data() for part in outgoing(tuple(wires)))
    for got, tensor in zip(split_tensors([wire.meta for wire in wires], buffer), tensors, strict=True):
        assert torch.equal(to_torch(got), tensor)
        assert to_torch(got).data_ptr() % tensor.element_size() == 0


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    part_bytes=st.integers(1, 17),
)
def test_parts_are_full_but_the_last_and_join_to_the_bundle(sizes: list[int], part_bytes: int) -> None:
    bundle = tuple(
        WireTensor(name="x", dtype=DType.UINT8, shape=(size,), data=bytes(range(i, i + size)))
        for i, size in enumerate(sizes)
    )
    parts = [part.data() for part in outgoing(bundle, lambda: part_bytes)]
    assert b"".join(parts) == b"".join(bytes(tensor.data) for tensor in bundle)
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert all(0 < len(part) <= part_bytes for part in parts[-1:])


@pytest.mark.parametrize(
    ("metas", "num_bytes", "reason"),
    [
        ((meta(),), 23, Refusal.CORRUPT),
        ((meta(shape=(2**62, 2**62)),), 2**40, Refusal.TOO_LARGE),
        ((meta(shape=(2**62, 2**62)),), 24, Refusal.CORRUPT),
        ((meta(shape=(1,) * 9),), 4, Refusal.TOO_LARGE),
        ((meta(shape=(1 << 20,)),), 4 << 20, Refusal.TOO_LARGE),
        ((meta(name=""),), 24, Refusal.CORRUPT),
        ((meta(name="../x\n"),), 24, Refusal.CORRUPT),
        ((meta(name="x" * 257),), 24, Refusal.CORRUPT),
        ((meta(),) * 5, 120, Refusal.TOO_LARGE),
        ((), 1, Refusal.CORRUPT),
    ],
)
def test_an_announcement_that_does_not_fit_is_refused(
    metas: tuple[TensorMeta, ...], num_bytes: int, reason: Refusal
) -> None:
    fault = fault_of(metas, num_bytes, Limits(max_bundle_bytes=1 << 20, max_tensors=4))
    assert fault is not None
    assert fault.reason is reason


@pytest.mark.parametrize(
    ("metas", "num_bytes"),
    [((), 0), ((meta(),), 24), ((meta(shape=(0, 2**62)),), 0), ((meta(name="lm_head.weight[0:16]"),), 24)],
)
def test_an_announcement_that_fits_is_taken(metas: tuple[TensorMeta, ...], num_bytes: int) -> None:
    assert fault_of(metas, num_bytes, Limits()) is None
