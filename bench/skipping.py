"""Training in this process, by the worker's own ops, where each microbatch leaves stages out.

Rules of this file
- The layout is `loop`: the first stage and the head see every microbatch; of the stages between, a path visits some.
- A path visits them in ascending order, jumps at most `MAX_JUMP` ahead, and over a step each is visited equally often.
- A stage's summed gradient is divided by the valid tokens of the microbatches that visited it, not by the batch's.
- Nothing but (job, step, number of stages left out) decides which stages a microbatch visits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.schedule import learning_rate
from skein.errors import UserError
from skein.model.layers import layers_of, tied_names
from skein.numeric.gradients import squared_norm
from skein.numeric.optim import adamw
from skein.plan.cut import cut
from skein.plan.plan import Group, Path
from skein.protocol.messages import Phase
from skein.protocol.ops import BackwardOp, ClearOp, ForwardOp, Loss, LossOp
from skein.rng import stream
from skein.types import ChunkRef, JobId, Layout, MicrobatchId, StageIndex, Step, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk, own_group
from worker.compute.ops import Compute, Done, Holding
from worker.data.dataset import open_dataset

MAX_JUMP = 4
"""How many stages ahead of the last one the next may lie. Source: SkipPipe (arXiv 2502.19913), its scheduler."""
_SWAPS_PER_PATH = 20
_HERE = WorkerId("here")
_CPU = torch.device("cpu")

Stages = tuple[int, ...]
"""Stages that one microbatch visits, ascending, from 0; the head goes without saying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippingStep:
    """One step: mean loss (nats per token) along the paths, norm of the weighted gradient before clipping."""

    loss: float
    gradient_norm: float


def is_legal(stages: Sequence[int]) -> bool:
    """Whether a path begins at stage 0, ascends and never jumps more than `MAX_JUMP` ahead.

    >>> is_legal((0, 1, 5)), is_legal((0, 5, 6)), is_legal((1, 2)), is_legal((0, 3, 2))
    (True, False, False, False)
    """
    return stages[0] == 0 and all(0 < later - stage <= MAX_JUMP for stage, later in pairwise(stages))


def even_paths(num_stages: int, num_left_out: int, num_paths: int) -> tuple[Stages, ...]:
    """Paths that leave out `num_left_out` stages each, evenly spread, every path one stage further on.

    Raises:
        UserError: no such paths, or stages 1 and up cannot all be visited equally often by so many.

    >>> even_paths(5, 2, 2)
    ((0, 1, 3), (0, 2, 4))
    """
    _check(num_stages, num_left_out, num_paths)
    num_skippable, visits = num_stages - 1, num_stages - 1 - num_left_out
    spread = [index * num_skippable // visits for index in range(visits)]
    return tuple(
        (0, *sorted((place + turn) % num_skippable + 1 for place in spread)) for turn in range(num_paths)
    )


def draw_paths(
    num_stages: int, num_left_out: int, num_paths: int, luck: np.random.Generator
) -> tuple[Stages, ...]:
    """As `even_paths`, shuffled: pairs of paths exchange a stage while both stay legal, so visits stay equal.

    Raises:
        UserError: as `even_paths`.
    """
    paths = [set(path) for path in even_paths(num_stages, num_left_out, num_paths)]
    if num_left_out and num_paths > 1:
        for _ in range(_SWAPS_PER_PATH * num_paths):
            one, other = luck.choice(num_paths, 2, replace=False)
            _exchange(paths, int(one), int(other), luck)
    return tuple(tuple(sorted(path)) for path in paths)


def _exchange(paths: list[set[int]], one: int, other: int, luck: np.random.Generator) -> None:
    given, taken = sorted(paths[one] - paths[other]), sorted(paths[other] - paths[one])
    if not given:
        return
    there, here = given[luck.integers(len(given))], taken[luck.integers(len(taken))]
    changed = (paths[one] - {there} | {here}, paths[other] - {here} | {there})
    if all(is_legal(sorted(path)) for path in changed):
        paths[one], paths[other] = changed


def _check(num_stages: int, num_left_out: int, num_paths: int) -> None:
    num_skippable, visits = num_stages - 1, num_stages - 1 - num_left_out
    if num_left_out < 0 or visits < 1 or math.ceil(num_skippable / visits) > MAX_JUMP:
        hint = f"of {num_stages} stages a path must visit the first and every fourth of the others or more"
        raise UserError("stages left out", num_left_out, hint)
    if num_paths * visits % num_skippable:
        hint = f"{num_skippable} stages cannot share {num_paths} x {visits} visits: give a multiple of {num_skippable}"
        raise UserError("microbatches", num_paths, hint)


def stage_weights(paths: Sequence[Stages], num_tokens: Sequence[int], num_stages: int) -> tuple[float, ...]:
    """What each stage's summed gradient is multiplied with: one over the valid tokens that visited it; 0 if none did.

    >>> stage_weights([(0, 1), (0, 2)], [10, 30], 3)
    (0.025, 0.1, 0.03333333333333333)
    """
    seen = [
        sum(tokens for path, tokens in zip(paths, num_tokens, strict=True) if stage in path)
        for stage in range(num_stages)
    ]
    return tuple(1.0 / tokens if tokens else 0.0 for tokens in seen)


class SkippingTraining:
    """A job's chunks on one worker, and steps through any paths over them."""

    def __init__(self, job: JobSpec, *, num_left_out: int) -> None:
        """Draws the model and opens the data.

        Raises:
            UserError: there are no legal paths, the data cannot be read, or the job is of a kind not trained here.
        """
        _check(job.parallel.stages, num_left_out, job.batch.num_microbatches)
        if job.parallel.layout is not Layout.LOOP:
            raise UserError(
                "parallel.layout", job.parallel.layout.value, "give loop: the head is never left out"
            )
        if tied_names(job.model):
            raise UserError(
                "model.shape.tie_word_embeddings", True, "give false: no group of two stages here"
            )
        self.job = job
        self.num_left_out = num_left_out
        layers = layers_of(job.model, sequence_tokens=job.data.sequence_tokens, precision=job.precision)
        self._cut = cut(layers, job.parallel.stages, job.parallel.layout)
        self.chunks = {s.index: Chunk.drawn(job, s, version=Step(0), device=_CPU) for s in self._cut}
        self._compute = Compute(_CPU)
        self._compute.hold(self._holding())

    def _holding(self) -> Holding:
        job = self.job
        groups = (
            Group(group=own_group(stage), members=(ChunkRef(stage=stage, worker=_HERE),), num_shards=1)
            for stage in self.chunks
        )
        dataset = open_dataset(job.data, job.model, seed=job.seed, batch=job.batch)
        begun_here = [MicrobatchId(m) for m in range(job.batch.num_microbatches)]
        return Holding(
            job_id=JobId(job.name),
            job=job,
            worker=_HERE,
            chunks=self.chunks,
            groups=tuple(groups),
            batches=BatchReader(dataset, job, begun_here),
        )

    def close(self) -> None:
        """Read no more data."""
        self._compute.forget()

    def paths_of(self, step: int) -> tuple[Stages, ...]:
        """What the microbatches of `step` visit."""
        luck = stream(self.job.seed, "paths", self.num_left_out, step)
        return draw_paths(self.job.parallel.stages, self.num_left_out, self.job.batch.num_microbatches, luck)

    def step(self, step: int) -> SkippingStep:
        """Forward and backward of every microbatch along its path, then one update of all stages."""
        paths = self.paths_of(step)
        losses = [self._train(Step(step), MicrobatchId(m), path) for m, path in enumerate(paths)]
        num_tokens = [loss.num_tokens for loss in losses]
        mean = math.fsum(loss.loss_sum for loss in losses) / sum(num_tokens)
        norm = self._update(step, stage_weights(self._with_head(paths), num_tokens, len(self.chunks)))
        self._compute.run(ClearOp(), {})
        return SkippingStep(loss=mean, gradient_norm=norm)

    def evaluate(self, stages: Stages | None = None) -> float:
        """Validation loss, nats per token, through `stages` or through all of them."""
        path = stages or tuple(range(self.job.parallel.stages))
        size = self.job.batch.microbatch_samples
        losses = [
            self._losses(Phase.EVALUATE, Step(0), MicrobatchId(m), self._hops(path))[0]
            for m in range(-(-self.job.evaluation.samples // size))
        ]
        return math.fsum(loss.loss_sum for loss in losses) / sum(loss.num_tokens for loss in losses)

    def copy_state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state of all stages."""
        return {name: part for chunk in self.chunks.values() for name, part in chunk.copy_state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `copy_state` gave."""
        for chunk in self.chunks.values():
            chunk.load_state(state, version=Step(int(state["step"])))

    # --- ops ---

    def _with_head(self, paths: Sequence[Stages]) -> list[Stages]:
        return [(*path, self.job.parallel.stages) for path in paths]

    def _hops(self, stages: Stages) -> Path:
        ends = (*stages, self.job.parallel.stages)
        return Path(hops=tuple(ChunkRef(stage=StageIndex(stage), worker=_HERE) for stage in ends))

    def _train(self, step: Step, microbatch: MicrobatchId, stages: Stages) -> Loss:
        path = self._hops(stages)
        loss, done = self._losses(Phase.TRAIN, step, microbatch, path)
        for hop in range(len(path.hops) - 2, -1, -1):
            back = BackwardOp(step=step, microbatch=microbatch, hop=hop, path=path)
            done = self._compute.run(back, done.outputs)
        return loss

    def _losses(self, phase: Phase, step: Step, microbatch: MicrobatchId, path: Path) -> tuple[Loss, Done]:
        done = Done()
        last = len(path.hops) - 1
        for hop in range(last):
            forward = ForwardOp(phase=phase, step=step, microbatch=microbatch, hop=hop, path=path)
            done = self._compute.run(forward, done.outputs)
        end = LossOp(phase=phase, step=step, microbatch=microbatch, hop=last, path=path)
        done = self._compute.run(end, done.outputs)
        assert isinstance(done.outcome, Loss)
        return done.outcome, done

    def _update(self, step: int, weights: Sequence[float]) -> float:
        """Applies one update with one clip for all; gives the norm before it."""
        spec = self.job.optimizer
        sums = [chunk.accumulator(own_group(stage)) for stage, chunk in self.chunks.items()]
        norm = math.sqrt(math.fsum(w * w * squared_norm(x) for w, x in zip(weights, sums, strict=True)))
        clip = 1.0 if spec.clip_norm is None else min(1.0, spec.clip_norm / (norm + 1e-6))
        rate = learning_rate(spec, step, self.job.budget.steps)
        for weight, chunk in zip(weights, self.chunks.values(), strict=True):
            params = {name: param.detach() for name, param in chunk.params.items()}
            chunk.optimizer = adamw.update(
                params,
                {name: _grad(param) for name, param in chunk.params.items()},
                chunk.optimizer,
                learning_rate=rate,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                decayed=adamw.decayed_names(params),
                gradient_scale=weight * clip,
            )
        return norm


def _grad(param: torch.nn.Parameter) -> Tensor:
    assert param.grad is not None, "every parameter has an accumulator"
    return param.grad
