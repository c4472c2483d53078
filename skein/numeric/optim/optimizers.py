"""Optimizer that the settings in a job file ask for."""

from typing import assert_never

from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.numeric.optim.adadelta import Adadelta
from skein.numeric.optim.adamw import AdamW
from skein.numeric.optim.lamb import Lamb
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.optim.sgd import Sgd


def optimizer_of(spec: OptimizerSpec) -> Optimizer:
    """The optimizer that `spec` asks for; schedule and clipping are not its business."""
    match spec:
        case AdamWSpec():
            return AdamW(betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)
        case AdamSpec():
            return AdamW(
                betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, decays_gradients=True
            )
        case AdadeltaSpec():
            return Adadelta(rho=spec.rho, eps=spec.eps, weight_decay=spec.weight_decay)
        case SgdSpec():
            return Sgd(momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay)
        case LambSpec():
            return Lamb(
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                min_ratio=spec.min_ratio,
                max_ratio=spec.max_ratio,
                bias_correction=spec.bias_correction,
            )
        case _:
            assert_never(spec)
