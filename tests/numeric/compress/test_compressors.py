"""Laws that every compressor obeys. A new one adds a row to `ROWS` and inherits them all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from skein.config.rule import Wire
from skein.numeric.compress.compressor import Compressor
from skein.numeric.compress.compressors import COMPRESSOR_BY_NAME, compressor_of
from skein.numeric.compress.feedback import FeedbackOwner, encode_with, no_residual
from skein.numeric.compress.packing import pack_bits, pack_codes, unpack_bits, unpack_codes
from skein.numeric.walker import StateClass
from skein.plan.agreeing.payload import payload_bytes, sign_bytes
from skein.wire.extra import DType
from tests.support.extent import part

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1000, 4096 * 3 + 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A compressor and what it promises."""

    name: Wire | Literal["sign"]
    bits: float
    """Per element of a long vector, scales included."""
    normal_loss: float
    """Of a long standard normal vector: the norm of what is lost over the norm of all."""
    step: float
    """No element is further off than this share of the largest magnitude within `block`."""
    block: int | None
    """None: elements have nothing to do with each other."""

    @property
    def compressor(self) -> Compressor:
        return compressor_of(self.name)

    def num_bytes(self, num_elements: int) -> int:
        """What plans reckon with."""
        return sign_bytes(num_elements, 1) if self.name == "sign" else payload_bytes(self.name, num_elements)


# Losses of even grids: step / sqrt(12) with the mean largest magnitude of a block (2.9 of 256, 2.7 of 128); of two bits
# with Max's four levels sqrt(0.1175); of signs sqrt(2 - 2 sqrt(2 / pi)). A few percent above them, for chance.
ROWS = (
    Row(name="fp32", bits=32.0, normal_loss=0.0, step=0.0, block=None),
    Row(name="bf16", bits=16.0, normal_loss=0.0018, step=2**-8, block=None),
    Row(name="int8", bits=8.125, normal_loss=0.0073, step=0.5001 / 127, block=256),
    # bfloat16 rounds the scale by up to 2^-9, of which the largest code sees seven times half a step.
    Row(name="int4", bits=4.125, normal_loss=0.122, step=0.5 / 7 * (1 + 2**-8) + 2**-8, block=128),
    Row(name="int2", bits=2.125, normal_loss=0.351, step=1.0 + 2**-8, block=256),
    Row(name="sign", bits=1.0, normal_loss=0.64, step=2.0, block=2**40),
)
WITHOUT_SIGN = tuple(row for row in ROWS if row.name != "sign")
"""It has one scale for the whole vector, in float64 if that is the vector's type."""


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    chosen: Row = request.param
    return chosen


def normal(num_elements: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def round_trip(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decode(compressor.encode(x), x.numel(), x.dtype)


def num_bytes(parts: Mapping[str, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_nearby(x: Tensor, block: int | None) -> Tensor:
    """For each element the largest magnitude that it shares a scale with."""
    magnitudes = x.abs()
    if block is None:
        return magnitudes
    return torch.cat([part.max().expand_as(part) for part in torch.split(magnitudes, block)])


def test_every_compressor_is_in_the_table() -> None:
    assert [row.name for row in ROWS] == list(COMPRESSOR_BY_NAME)


def test_no_element_is_further_off_than_promised(row: Row) -> None:
    for num_elements in LENGTHS[1:]:
        x = normal(num_elements, seed=num_elements)
        off = (x - round_trip(row.compressor, x)).abs()
        assert (off <= row.step * largest_nearby(x, row.block)).all()


def test_a_normal_vector_loses_no_more_than_promised(row: Row) -> None:
    x = normal(300_000)
    assert (x - round_trip(row.compressor, x)).norm() <= row.normal_loss * x.norm()


@pytest.mark.parametrize("num_elements", LENGTHS)
def test_bytes_are_as_promised_and_of_types_that_travel(row: Row, num_elements: int) -> None:
    parts = row.compressor.encode(normal(num_elements))
    assert num_bytes(parts) == row.num_bytes(num_elements)
    assert {str(part.dtype).removeprefix("torch.") for part in parts.values()} <= set(DType)
    assert all(part.ndim == 1 and part.is_contiguous() for part in parts.values())


def test_bits_are_what_long_vectors_take(row: Row) -> None:
    num_elements = 2**20
    # The sign's one scale is 3e-5 of a bit.
    assert 8 * row.num_bytes(num_elements) / num_elements == pytest.approx(row.bits, rel=1e-4)


@pytest.mark.parametrize(
    ("num_elements", "dtype"),
    part(list(product((0, 5, 300), (torch.float64, torch.float32, torch.bfloat16))), every=4),
)
def test_zeros_come_back_as_zeros_of_the_same_type(row: Row, num_elements: int, dtype: torch.dtype) -> None:
    back = round_trip(row.compressor, torch.zeros(num_elements, dtype=dtype))
    assert back.dtype is dtype
    assert back.shape == (num_elements,)
    assert not back.any()


@pytest.mark.parametrize("row", WITHOUT_SIGN, ids=lambda row: row.name)
def test_a_huge_element_spoils_no_block_but_its_own(row: Row) -> None:
    x, spoilt = normal(1024), normal(1024)
    spoilt[300] = 3e38
    clean, back = round_trip(row.compressor, x), round_trip(row.compressor, spoilt)
    assert torch.equal(back[:256], clean[:256])
    assert torch.equal(back[512:], clean[512:])
    assert back[300] == pytest.approx(3e38, rel=2**-7)  # bfloat16 scales


@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-30, 1e30, 3.38e38])
def test_the_smallest_and_the_largest_magnitudes_stay_finite_and_bounded(row: Row, size: float) -> None:
    x = normal(1000).clamp_(-1, 1) * size
    back = round_trip(row.compressor, x)
    assert back.isfinite().all()
    assert (
        back.abs().max() <= 1.01 * size + 130 * 1.5e-45
    )  # below 1e-38 a step is itself a few of the least numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(row: Row, bad: float) -> None:
    x = normal(300)
    x[299] = bad
    with pytest.raises(ValueError, match="finite"):
        row.compressor.encode(x)


@pytest.mark.parametrize("row", WITHOUT_SIGN, ids=lambda row: row.name)
def test_what_no_wire_type_can_say_is_refused(row: Row) -> None:
    with pytest.raises(ValueError, match=r"finite|too large"):
        row.compressor.encode(torch.full((3,), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("x", [torch.zeros(2, 2), torch.zeros(3, dtype=torch.int64)])
def test_only_vectors_of_floats_are_encoded(row: Row, x: Tensor) -> None:
    with pytest.raises(ValueError, match="vector of floats"):
        row.compressor.encode(x)


def test_encoding_leaves_the_vector_alone_and_shares_no_memory(row: Row) -> None:
    x = normal(512)
    parts = row.compressor.encode(x)
    kept = {name: part.clone() for name, part in parts.items()}
    back = row.compressor.decode(parts, 512, torch.float32)
    assert torch.equal(x, normal(512))
    x.zero_(), back.zero_()
    assert same_bits(parts, kept)


def test_only_numbers_in_full_are_summed_as_they_are(row: Row) -> None:
    # Integers: their sums are exact in float32, so only the compressor could make the two sides differ.
    x, y = (normal(1000, seed=seed).mul_(100).round_() for seed in (1, 2))
    total = round_trip(row.compressor, x) + round_trip(row.compressor, y)
    assert torch.equal(total, round_trip(row.compressor, x + y)) is (row.name == "fp32")


def test_the_number_of_threads_changes_no_bit(row: Row) -> None:
    x, encoded = normal(300_001), []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            encoded.append(row.compressor.encode(x))
    finally:
        torch.set_num_threads(num_threads)
    assert same_bits(encoded[0], encoded[1])
    assert same_bits(encoded[0], encoded[2])


def test_decoding_refuses_what_is_not_an_encoding(row: Row) -> None:
    parts = row.compressor.encode(normal(300))
    longest = max(parts, key=lambda name: num_bytes({name: parts[name]}))
    for wrong in ({}, parts | {"more": parts[longest]}, parts | {longest: parts[longest][1:]}):
        with pytest.raises(ValueError, match="fit"):
            row.compressor.decode(wrong, 300, torch.float32)
    with pytest.raises(ValueError, match="fit"):
        row.compressor.decode(parts, 299 - 8, torch.float32)
    scales = [name for name, part in parts.items() if part.is_floating_point()]
    for name in scales:
        poisoned = parts | {name: torch.full_like(parts[name], math.nan)}
        with pytest.raises(ValueError, match="finite"):
            row.compressor.decode(poisoned, 300, torch.float32)


def test_error_feedback_loses_nothing(row: Row) -> None:
    # In float64 a sum of forty terms of order 1 rounds at 1e-14; what was said and what is left make up all of it.
    residual = no_residual(777, dtype=torch.float64, device=torch.device("cpu"))
    given = said = torch.zeros(777, dtype=torch.float64)
    for step in range(40):
        x = normal(777, seed=step, dtype=torch.float64)
        parts, residual = encode_with(row.compressor, x, residual)
        given, said = given + x, said + row.compressor.decode(parts, 777, torch.float64)
    torch.testing.assert_close(said + residual, given, rtol=0, atol=1e-12)


def test_a_residual_stays_bounded_when_the_same_is_said_again_and_again(row: Row) -> None:
    x = normal(2048)
    residual = no_residual(2048, dtype=x.dtype, device=x.device)
    norms = []
    for _ in range(60):
        _, residual = encode_with(row.compressor, x, residual)
        norms.append(float(residual.norm()))
    assert max(norms[30:]) <= 2 * max(norms[:30]) + 1e-6 * float(x.norm())


def test_a_residual_of_another_shape_is_refused(row: Row) -> None:
    with pytest.raises(ValueError, match="residual"):
        encode_with(row.compressor, normal(8), torch.zeros(7))


def test_two_bits_never_decode_further_off_than_zero_would_be() -> None:
    for x in (normal(1024), normal(1024).pow(9), torch.eye(1024)[5], torch.ones(1000)):
        # 2^-8: the means are rounded to bfloat16
        assert (x - round_trip(compressor_of("int2"), x)).norm() <= (1 + 2**-8) * x.norm()


def test_signs_are_packed_as_numpy_packs_them() -> None:
    for num_elements in LENGTHS:
        x = normal(num_elements)
        x[::5] = 0.0
        x[1::7] = -0.0
        parts = compressor_of("sign").encode(x)
        assert parts["bits"].numpy().tobytes() == np.packbits(x.numpy() >= 0).tobytes()
        if num_elements:
            root_mean_square = float(np.sqrt(np.mean(x.numpy().astype(np.float64) ** 2)))
            assert parts["scale"].item() == pytest.approx(root_mean_square, rel=1e-6)  # float32


@pytest.mark.parametrize(("num_elements", "bits_each"), part(list(product(LENGTHS, (1, 2, 4))), every=4))
def test_codes_come_back_from_their_bytes(num_elements: int, bits_each: int) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    codes = torch.randint(0, 2**bits_each, (num_elements,), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits_each=bits_each)
    assert packed.shape == (-(-num_elements * bits_each // 8),)
    assert torch.equal(unpack_codes(packed, num_elements, bits_each=bits_each), codes)


@pytest.mark.parametrize("num_elements", LENGTHS)
def test_bits_are_packed_alike_by_numpy_and_by_torch(num_elements: int) -> None:
    bits = normal(num_elements) > 0
    packed = pack_bits(bits)
    assert torch.equal(packed, pack_codes(bits.to(torch.uint8), bits_each=1))
    assert torch.equal(unpack_bits(packed, num_elements), bits)


def test_residuals_are_saved_and_never_copied() -> None:
    assert FeedbackOwner.PEER.slot.kind is StateClass.PRIVATE
    assert FeedbackOwner.CHUNK.slot.kind is StateClass.SHARD
    assert all(owner.slot.is_saved and not owner.slot.is_copied for owner in FeedbackOwner)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        compressor_of("int3")
