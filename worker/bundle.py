"""Tensors as they travel: named bytes with an element type from the allow-list, and torch's tensors made of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from skein.errors import LocalError
from skein.protocol.messages.tensors import Refusal
from skein.wire.extra import DType, TensorMeta
from worker.transport.memory import BufferPool

_TORCH_BY_DTYPE = {dtype: getattr(torch, dtype) for dtype in DType}
_DTYPE_BY_TORCH: dict[torch.dtype, DType] = {value: dtype for dtype, value in _TORCH_BY_DTYPE.items()}
_POOL = BufferPool()
_NAME = re.compile(r"[A-Za-z0-9_.:/\[\]-]{1,256}")

# --- values ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """A tensor's elements in row-major order, little-endian. Whoever made it leaves the bytes alone."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview | bytes
    """Memory of single bytes, as many as dtype and shape say."""

    @property
    def meta(self) -> TensorMeta:
        """All but the bytes."""
        return TensorMeta(name=self.name, dtype=self.dtype, shape=self.shape)


Bundle = tuple[WireTensor, ...]
"""Tensors that travel together. Empty for a release, which says something by arriving."""


def bundle_bytes(bundle: Bundle) -> int:
    """Bytes of all elements."""
    return sum(len(tensor.data) for tensor in bundle)


# --- limits ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what this worker takes from peers, so that none of them can exhaust it.

    Raise `max_bundle_bytes` if one boundary tensor or gradient shard is larger, `max_state_bytes` if one chunk's
    parameters and optimizer state are. `max_pending_bytes` bounds the memory of tensors that are still arriving. One
    peer may have half of the streams, transfers and probes; a call that is silent for `silent_s` loses its place.
    """

    max_bundle_bytes: int = 4 << 30
    max_pending_bytes: int = 8 << 30
    max_state_bytes: int = 1 << 40
    max_dims: int = 8
    max_tensors: int = 1 << 16
    max_streams: int = 256
    max_transfers: int = 8
    max_probes: int = 8
    silent_s: float = 60.0
    probe_silent_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFault:
    """Reason for which tensors are refused, as a code and in words."""

    reason: Refusal
    text: str


def fault_of(tensors: Iterable[TensorMeta], num_bytes: int, limits: Limits) -> BundleFault | None:
    """Fault in an announcement of `tensors` in `num_bytes` bytes; None: their memory may be allocated."""
    metas, size = tuple(tensors), Refusal.TOO_LARGE
    if len(metas) > limits.max_tensors:
        return BundleFault(reason=size, text=f"{len(metas)} tensors, the limit is {limits.max_tensors}")
    for meta in metas:
        if _NAME.fullmatch(meta.name) is None:
            return BundleFault(reason=Refusal.CORRUPT, text=f"{meta.name[:256]!r} is no name of a tensor")
        if len(meta.shape) > limits.max_dims:
            text = f"{meta.name} has {len(meta.shape)} dims, the limit is {limits.max_dims}"
            return BundleFault(reason=size, text=text)
    if num_bytes > limits.max_bundle_bytes:
        return BundleFault(reason=size, text=f"{num_bytes} bytes, the limit is {limits.max_bundle_bytes}")
    expected = sum(meta.num_bytes for meta in metas)
    if expected != num_bytes:
        text = f"{num_bytes} bytes announced, dtypes and shapes need {expected}"
        return BundleFault(reason=Refusal.CORRUPT, text=text)
    return None


# --- buffers ---


def allocate(num_bytes: int) -> memoryview:
    """Writable memory of undefined content, aligned for every dtype; large blocks are those that others have left."""
    return _POOL.allocate(num_bytes)


def release_blocks() -> None:
    """Give large blocks that wait for use back to the system; the next ones are fresh."""
    _POOL.release()


def split_tensors(tensors: Iterable[TensorMeta], data: memoryview) -> Bundle:
    """The tensors that lie in `data` one after the other; they share its memory unless that breaks alignment."""
    bundle: list[WireTensor] = []
    start = 0
    for meta in tensors:
        piece = data[start : start + meta.num_bytes]
        if start % meta.dtype.num_bytes:
            aligned = allocate(len(piece))
            aligned[:] = piece
            piece = aligned
        bundle.append(WireTensor(name=meta.name, dtype=meta.dtype, shape=meta.shape, data=piece))
        start += meta.num_bytes
    return tuple(bundle)


# --- torch ---


def to_wire(name: str, tensor: torch.Tensor) -> WireTensor:
    """`tensor` for the wire, sharing its memory if it is contiguous on the CPU: do not change it before it is sent.

    Raises:
        LocalError: its dtype may not travel.
    """
    dtype = _DTYPE_BY_TORCH.get(tensor.dtype)
    if dtype is None:
        raise LocalError(f"{name}: {tensor.dtype} may not travel")
    flat = tensor.detach().cpu().contiguous().flatten()
    data = flat.view(torch.uint8).numpy().data
    return WireTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Dtype of the tensors that `to_torch` makes of wire tensors of `dtype`."""
    found: torch.dtype = _TORCH_BY_DTYPE[dtype]
    return found


def to_torch(tensor: WireTensor) -> torch.Tensor:
    """`tensor` on the CPU, sharing its memory if that is writable.

    Raises:
        LocalError: the bytes are not as many as dtype and shape say.
    """
    dtype = _TORCH_BY_DTYPE[tensor.dtype]
    if len(tensor.data) != tensor.meta.num_bytes:
        raise LocalError(f"{tensor.meta} with {len(tensor.data)} bytes")
    if not tensor.data:
        return torch.empty(tensor.shape, dtype=dtype)
    data = memoryview(tensor.data)
    raw = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
    # A byte other than 0 and 1 is no bool to torch's kernels.
    flat = raw.ne(0) if tensor.dtype is DType.BOOL else raw.view(dtype)
    return flat.reshape(tensor.shape)
