"""Operands and outputs of ops between the ops: as tensors while they stay here, as a bundle once they travel.

Payloads are filed under (generation, key), and what has been handed over is gone: `worker.boundary` keeps what may be
needed again.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skein.errors import LocalError
from skein.plan.ops import Direction
from skein.protocol.messages.tensors import Envelope, HopTensor, ShardKind, ShardTensor, TensorHeader
from skein.protocol.worker.ops import TensorKey, hop_key
from skein.types import Generation, Step
from worker.bundle import Bundle, allocate, bundle_bytes, to_torch, to_wire

Payload = Mapping[str, Tensor] | Bundle

HIDDEN, LABELS, GRADIENT, SHARD = "x", "labels", "dy", "shard"
"""Names of tensors that travel."""


def pack(tensors: Mapping[str, Tensor]) -> Bundle:
    """Tensors by name as they travel, sharing memory where they lie in the host's."""
    return tuple(to_wire(name, tensor) for name, tensor in tensors.items())


def unpack(payload: Payload, device: torch.device) -> Mapping[str, Tensor]:
    """Tensors by name on `device`, sharing memory where they are there already."""
    if isinstance(payload, Mapping):
        return payload
    return {tensor.name: to_torch(tensor).to(device) for tensor in payload}


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Vectors one after the other, in a new one; in the host's memory in a block that an earlier one has left.

    >>> concatenated([torch.zeros(2), torch.ones(1)])
    tensor([0., 0., 1.])
    """
    first = parts[0]
    num_bytes = sum(part.nbytes for part in parts)
    if first.device.type != "cpu" or not num_bytes:
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=torch.frombuffer(allocate(num_bytes), dtype=first.dtype))


def key_of(header: TensorHeader) -> TensorKey:
    """What a tensor of this header is filed under."""
    return hop_key(header) if isinstance(header, HopTensor) else header


def is_release(header: TensorHeader) -> bool:
    """Whether it says all by arriving: an evaluation's slot is free again."""
    return (
        isinstance(header, HopTensor) and not header.phase.trains and header.direction is Direction.BACKWARD
    )


class PayloadStore:
    """Payloads that wait for an op or for sending, by generation and key. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._payloads: dict[tuple[Generation, TensorKey], Payload] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def file(self, generation: Generation, key: TensorKey, payload: Payload) -> None:
        """Keep `payload`; one that is there under the same key gives way."""
        self._remove((generation, key))
        self._payloads[generation, key] = payload
        self.num_bytes += _num_bytes(payload)

    def find(self, generation: Generation, key: TensorKey) -> Payload | None:
        """A payload, which is the finder's from now on; None if nothing is filed there."""
        return self._remove((generation, key))

    def for_sending(self, envelope: Envelope) -> Bundle:
        """The bundle that goes with `envelope`. A shard's sum stays filed: it goes to several, and is used here too.

        Raises:
            LocalError: nothing is filed there.
        """
        header = envelope.header
        if is_release(header):
            return ()
        place = (envelope.generation, key_of(header))
        is_shared = isinstance(header, ShardTensor) and header.kind is ShardKind.RESULT
        payload = self._payloads.get(place) if is_shared else self._remove(place)
        if payload is None:
            raise LocalError(f"generation {place[0]} has no payload under {place[1]}")
        return pack(payload) if isinstance(payload, Mapping) else payload

    def drop(self, generation: Generation, key: TensorKey) -> None:
        """Forget a payload, if it is there."""
        self._remove((generation, key))

    def drop_older(self, generation: Generation) -> None:
        """Forget what belongs to generations before `generation`; what came early for a later one stays."""
        self._drop_all([place for place in self._payloads if place[0] < generation])

    def drop_steps(self, step: Step) -> None:
        """Forget what belongs to `step` or one before: it is committed."""
        self._drop_all([place for place in self._payloads if place[1].step <= step])

    def clear(self) -> None:
        """Forget everything."""
        self._payloads.clear()
        self.num_bytes = 0

    def _drop_all(self, places: list[tuple[Generation, TensorKey]]) -> None:
        for place in places:
            self._remove(place)

    def _remove(self, place: tuple[Generation, TensorKey]) -> Payload | None:
        payload = self._payloads.pop(place, None)
        if payload is not None:
            self.num_bytes -= _num_bytes(payload)
        return payload


def _num_bytes(payload: Payload) -> int:
    if isinstance(payload, Mapping):
        return sum(tensor.nbytes for tensor in payload.values())
    return bundle_bytes(payload)
