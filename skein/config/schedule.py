"""Learning rate over the steps of a job."""

import math
from typing import assert_never

from skein.config.optimizer import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int, total_steps: int) -> float:
    """The learning rate of `step`: a straight line up to its peak, then down as `schedule` says.

    With W warm-up steps, step t < W gets peak * (t + 1) / W, so no step is wasted on a rate of zero and step W - 1
    is at the peak. From there it falls to peak * `final_learning_rate_ratio`, which the last step gets, by half a
    cosine or a straight line; or it stays; or, under `step`, it is from step W on peak * `drop_ratio` to the power of
    (t - W) // `drop_every_steps`, as torch's StepLR has it. A job that is not longer than its warm-up ends on the line.

    Args:
        step: 0-based, in [0, total_steps).
        total_steps: steps of the whole job.

    Raises:
        ValueError: the step is not one of the job's.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts" (2017), Eq. 5, one cycle.

    >>> from skein.config.optimizer import AdamWSpec
    >>> cosine = AdamWSpec(learning_rate=1.0, warmup_steps=4, final_learning_rate_ratio=0.1)
    >>> [round(learning_rate(cosine, step, 10), 3) for step in range(10)]
    [0.25, 0.5, 0.75, 1.0, 0.94, 0.775, 0.55, 0.325, 0.16, 0.1]
    >>> linear = AdamWSpec(learning_rate=1.0, warmup_steps=4, final_learning_rate_ratio=0.1, schedule="linear")
    >>> [round(learning_rate(linear, step, 10), 3) for step in range(10)]
    [0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    >>> drops = AdamWSpec(learning_rate=1.0, warmup_steps=2, schedule="step", drop_every_steps=3, drop_ratio=0.5)
    >>> [learning_rate(drops, step, 9) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} is not one of {total_steps}")
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step < warmup:
        return peak * ((step + 1) / warmup)
    top = max(warmup - 1, 0)
    progress = (step - top) / max(total_steps - 1 - top, 1)
    fall = peak * (1.0 - optimizer.final_learning_rate_ratio)
    match optimizer.schedule:
        case "cosine":
            return peak - fall * 0.5 * (1.0 - math.cos(math.pi * progress))
        case "linear":
            return peak - fall * progress
        case "constant":
            return peak
        case "step":
            assert optimizer.drop_every_steps is not None
            return float(peak * optimizer.drop_ratio ** ((step - warmup) // optimizer.drop_every_steps))
        case _:
            assert_never(optimizer.schedule)
