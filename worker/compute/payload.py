"""Operands and outputs of ops between the ops: as tensors while they stay here, as a bundle once they travel."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skein.model.sparse.choices import Choices
from skein.types import MicrobatchId, WorkerId
from worker.bundle import Bundle, allocate, bundle_bytes, to_torch, to_wire
from worker.data.dataset import Batch
from worker.model.base import Crossing, Labels

Payload = Mapping[str, Tensor] | Bundle

HIDDEN, LABELS, WEIGHTS, GRADIENT, SHARD = "x", "labels", "weights", "dy", "shard"
TOKENS, SCORES, SCORES_GRADIENT = "tokens", "scores", "dscores"
VALID, CHOICES, REPEATED = "valid", "choices", "repeated"
"""Names of tensors that travel: three where the vocabulary is cut, the last three in training where there are experts.

With an activation go the choices of the stage that gives it, and they come back with its gradient: whoever goes back
there then routes as that one did. With the gradient of a stage where paths end go its own, as `repeated`, which whoever
is handed the activation once more takes for its own.
"""
TELLING = 0
"""The shard of a stage's sums with which its holders tell each other choices, on its way to the owner and back."""
_OF_MICROBATCH = re.compile(rf"{CHOICES}/(\d{{1,9}})", re.ASCII)
DIFFERENTIABLE = HIDDEN, SCORES
"""Names of a boundary's tensors that have gradients, in the order of `Crossing.differentiable`."""
GRADIENTS = GRADIENT, SCORES_GRADIENT
"""Names of the gradients, in the same order."""


def crossing(
    boundary: Crossing, num_valid: int | None = None, labels: Labels | None = None
) -> dict[str, Tensor]:
    """Tensors of a boundary by the names under which they travel, with what goes along.

    Args:
        num_valid: valid tokens, where experts need to know.
        labels: none where they stay.
    """
    named = {HIDDEN: boundary.hidden, TOKENS: boundary.tokens, SCORES: boundary.scores}
    named |= {VALID: None if num_valid is None else torch.tensor(num_valid)}
    named |= {} if labels is None else {LABELS: labels.labels, WEIGHTS: labels.weights}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def choices_name(microbatch: MicrobatchId) -> str:
    """Name under which choices of a microbatch go to other holders of the stage, with the shard `TELLING`.

    >>> choices_name(MicrobatchId(3)), microbatch_of("choices/3"), microbatch_of("choices")
    ('choices/3', 3, None)
    """
    return f"{CHOICES}/{microbatch}"


def microbatch_of(name: str) -> MicrobatchId | None:
    """The microbatch in such a name; None: it is another."""
    found = _OF_MICROBATCH.fullmatch(name)
    return None if found is None else MicrobatchId(int(found[1]))


def are_choices(told: Tensor, form: Choices, num_layers: int) -> bool:
    """Whether a tensor from elsewhere is choices of so many layers."""
    fits = told.shape == (num_layers, *form.shape)
    return fits and bool(((told >= 0) & (told <= form.most)).all())


def tensor_if_any(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    """The tensor under its name, if there is one."""
    return {} if tensor is None else {name: tensor}


def crossed(tensors: Mapping[str, Tensor]) -> Crossing:
    """The boundary that has arrived as these tensors."""
    return Crossing(tensors[HIDDEN], tokens=tensors.get(TOKENS), scores=tensors.get(SCORES))


def labelled(tensors: Mapping[str, Tensor]) -> Labels | None:
    """Labels that have arrived with these tensors; None: they have not."""
    return Labels(tensors[LABELS], tensors.get(WEIGHTS)) if LABELS in tensors else None


def placed(batch: Batch, device: torch.device) -> tuple[Tensor, Labels]:
    """Samples and labels of a batch on `device`."""
    inputs, labels = (torch.from_numpy(x).to(device, non_blocking=True) for x in (batch.inputs, batch.labels))
    if batch.weights is None:
        return inputs, Labels(labels)
    return inputs, Labels(labels, torch.from_numpy(batch.weights).to(device, non_blocking=True))


def pack(tensors: Mapping[str, Tensor]) -> Bundle:
    """Tensors by name as they travel, sharing memory where they lie in the host's."""
    return tuple(to_wire(name, tensor) for name, tensor in tensors.items())


def ready(tensors: Mapping[str, Tensor], to: tuple[WorkerId, ...], me: WorkerId) -> Payload:
    """Payload of `tensors` for workers: as they are if they stay at this one, else as they travel."""
    return tensors if to == (me,) else pack(tensors)


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


def weight_bytes(payload: Payload) -> int:
    """Bytes that a payload takes."""
    if isinstance(payload, Mapping):
        return sum(tensor.nbytes for tensor in payload.values())
    return bundle_bytes(payload)
