"""Elastic averaging SGD: what leader SGD is compared with, and no rule of ours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class ElasticAveraging:
    """Workers tied to a centre that all pull along, every step; `elasticity` is the share of the way.

        x_i = x_i - learning_rate * grad_i - elasticity * (x_i - centre)
        centre = centre + elasticity * sum of (x_i - centre)        both from the values before

    Source: Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (2015); there elasticity is beta
    over the number of workers.
    """

    workers: list[Tensor]
    centre: Tensor
    elasticity: float

    def step(self, grads: Sequence[Tensor], *, learning_rate: float) -> None:
        """One step of all workers and the centre, in place."""
        ties = [self.elasticity * (x - self.centre) for x in self.workers]
        for x, grad, tie in zip(self.workers, grads, ties, strict=True):
            x.sub_(learning_rate * grad + tie)
        self.centre.add_(torch.stack(ties).sum(dim=0))


def tied(starts: Sequence[Tensor], *, elasticity: float) -> ElasticAveraging:
    """Workers at these places, the centre in their middle."""
    return ElasticAveraging(
        workers=[x.clone() for x in starts],
        centre=torch.stack(list(starts)).mean(dim=0),
        elasticity=elasticity,
    )
