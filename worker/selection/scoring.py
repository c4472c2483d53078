"""Scores where paths end, of samples that nothing is learned from."""

import torch
from torch.nn import functional

from skein.config.job import JobSpec
from skein.protocol.worker.ops import Loss, LossInputOp, LossOp
from worker.compute.chunk import Chunk
from worker.compute.exchanging import claim_of
from worker.model.base import Crossing, Labels
from worker.selection.traits import Traits


def loss_at_end(
    op: LossOp | LossInputOp, chunk: Chunk, x: Crossing, labels: Labels, job: JobSpec, traits: Traits
) -> Loss:
    """Loss of a microbatch; in a probe also the digest of the parameters, in a selection `traits` keep its rows."""
    with torch.no_grad():
        if op.phase.selects:
            hidden, logits = chunk.module.traits(x.hidden)
            traits.keep(job, op.step, op.microbatch, hidden, logits, labels.labels)
            total = functional.cross_entropy(logits, labels.labels, reduction="sum")
            return Loss(loss_sum=total.item(), num_tokens=labels.num_valid)
        summed, num_valid = chunk.functions.score(x, labels.labels, labels.weights)
    claimed = claim_of(chunk) if op.phase.scores_walkers else ""
    return Loss(loss_sum=summed.item(), num_tokens=num_valid, digest=claimed)
