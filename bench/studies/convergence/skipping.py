"""Training in this process, by the worker's own ops, where each microbatch leaves stages out.

Rules of this file
- The layout is `loop`: the first stage and the head see every microbatch; of the stages between, a path visits some.
- A path visits them in ascending order, jumps at most `MAX_JUMP` ahead, and over a step each is visited equally often.
- A stage's summed gradient is divided by the valid tokens of the microbatches that visited it, not by the batch's.
- Nothing but the job's seed, the step and the number of stages left out decides which stages a microbatch visits.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.schedule import learning_rate
from skein.errors import LocalError, UserError
from skein.model.layers import tied_names
from skein.plan.agreeing.rounds import plain_groups
from skein.plan.changing.clauses import parse_clauses
from skein.plan.cut import cut
from skein.plan.ops import OpKind
from skein.plan.plan import Alternates, ChunkPlan, Group, Path, Plan, PlannedOp, Schedule
from skein.protocol.messages.directives import Ledger, Prepare, StepRecord
from skein.protocol.messages.reports import StageDone, Vote
from skein.protocol.messages.tensors import Phase
from skein.protocol.rounds.round import LedgerHeard, Round, RoundEvent, RoundFailed, StepTerms, VoteHeard
from skein.protocol.worker.ops import COMPUTE_OPS, ApplyOp, ForwardOp, Joined, JoinOp, Loss, LossOp, Op
from skein.rng import stream
from skein.types import ChunkRef, Epoch, Generation, JobId, Layout, MicrobatchId, Own, Step, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.compute.holding import Holding
from worker.compute.ops import Compute, Done
from worker.compute.state import STEP
from worker.data.dataset import open_dataset

MAX_JUMP = 4
"""How many stages ahead of the last one the next may lie. Source: SkipPipe (arXiv 2502.19913), its scheduler."""
_SWAPS_PER_PATH = 20
_HERE = WorkerId("here")
_CPU = torch.device("cpu")
_EPOCH, _GENERATION = Epoch(1), Generation(1)
_ANY = Step(0)
"""An evaluation belongs to no step."""

Stages = tuple[int, ...]
"""Stages that one microbatch visits, ascending, from 0; the head goes without saying."""


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


class SkippingTraining:
    """A job's chunks on one worker, and steps along paths that leave stages out.

    A step is a real one in all but the wire: ops in the order of a schedule, ledgers, a vote per group, the decision of
    the Round machine, and the update that its record asks for.
    """

    def __init__(self, job: JobSpec) -> None:
        """Draws the model and opens the data; `job.skip` says how many stages each microbatch leaves out.

        Raises:
            UserError: there are no legal paths, the data cannot be read, or the job is of a kind not trained here.
        """
        num_left_out = job.parallel.stages - job.num_visited_stages
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
        layers = job.layers
        self._stages = cut(layers, job.parallel.stages, job.parallel.layout)
        self._refs = tuple(ChunkRef(stage=stage.index, worker=_HERE) for stage in self._stages)
        self._groups = tuple(Group(group=Own(ref.stage), members=(ref,), num_shards=1) for ref in self._refs)
        self.chunks = {s.index: Chunk.drawn(job, s, version=Step(0), device=_CPU) for s in self._stages}
        self._compute = Compute(_CPU)
        self._compute.hold(self._holding())

    def _holding(self) -> Holding:
        job = self.job
        dataset = open_dataset(job.data, job.model, seed=job.seed, batch=job.batch)
        begun_here = [MicrobatchId(m) for m in range(job.batch.num_microbatches)]
        return Holding(
            job_id=JobId(job.name),
            job=job,
            worker=_HERE,
            chunks=self.chunks,
            groups=self._groups,
            batches=BatchReader(dataset, job, begun_here),
            resumption=None,
        )

    def close(self) -> None:
        """Read no more data."""
        self._compute.forget()

    def paths_of(self, step: int) -> tuple[Stages, ...]:
        """What the microbatches of `step` visit."""
        luck = stream(self.job.seed, "paths", self.num_left_out, step)
        return draw_paths(self.job.parallel.stages, self.num_left_out, self.job.batch.num_microbatches, luck)

    def step(self, step: int) -> StepRecord:
        """Forward and backward of every microbatch along its path, one update of all stages, and its record."""
        plan = self.plan_of(step)
        record = self._decided(Step(step), plan, self._train(Step(step), plan))
        self._compute.run(ApplyOp(record=record), {})
        return record

    def evaluate(self, stages: Stages | None = None) -> float:
        """Validation loss, nats per token, through `stages` or through all of them."""
        path = self._path(stages or tuple(range(self.job.parallel.stages)))
        size = self.job.batch.microbatch_samples
        losses = [
            self._evaluated(MicrobatchId(m), path) for m in range(-(-self.job.evaluation.samples // size))
        ]
        return math.fsum(loss.loss_sum for loss in losses) / sum(loss.num_tokens for loss in losses)

    def copy_state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state of all stages."""
        return {name: part for chunk in self.chunks.values() for name, part in chunk.copy_state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `copy_state` gave."""
        for chunk in self.chunks.values():
            chunk.load_state(state, version=Step(int(state[STEP])))

    # --- the plan of a step ---

    def _path(self, stages: Stages) -> Path:
        return Path(hops=tuple(self._refs[stage] for stage in (*stages, self.job.parallel.stages)))

    def plan_of(self, step: int) -> Plan:
        """The paths of a step, and everything else as ever: all on one worker. Nobody predicts how long it takes."""
        whole = self._path(tuple(range(self.job.parallel.stages)))
        found = tuple(self._path(path) for path in self.paths_of(step))
        ops = (op for m, path in enumerate(found) for op in _there_and_back(MicrobatchId(m), path))
        return Plan(
            layout=Layout.LOOP,
            stages=self._stages,
            chunks=tuple(ChunkPlan(chunk=ref, slots=1) for ref in self._refs),
            paths=found,
            evaluation_paths=(whole,),
            schedules=(Schedule(worker=_HERE, ops=tuple(ops)),),
            alternates=tuple(Alternates(chunk=ref, others=()) for ref in self._refs),
            groups=self._groups,
            predicted_step_s=0.0,
            lower_bound_s=0.0,
            reason=parse_clauses("one microbatch after the other, on one worker"),
        )

    # --- ops ---

    def _train(self, step: Step, plan: Plan) -> list[Loss]:
        """Every op of the schedule; the loss of every microbatch. Each op takes what the one before it gave."""
        losses, done = [], Done()
        for planned in plan.schedules[0].ops:
            op = _op(planned, step, plan.paths[planned.microbatch])
            done = self._compute.run(op, done.outputs)
            if isinstance(done.outcome, Loss):
                losses.append(done.outcome)
        return losses

    def _evaluated(self, microbatch: MicrobatchId, path: Path) -> Loss:
        done, last = Done(), len(path.hops) - 1
        for hop in range(last):
            forward = ForwardOp(phase=Phase.EVALUATE, step=_ANY, microbatch=microbatch, hop=hop, path=path)
            done = self._compute.run(forward, done.outputs)
        end = LossOp(phase=Phase.EVALUATE, step=_ANY, microbatch=microbatch, hop=last, path=path)
        loss = self._compute.run(end, done.outputs).outcome
        assert isinstance(loss, Loss)
        return loss

    def _decided(self, step: Step, plan: Plan, losses: Sequence[Loss]) -> StepRecord:
        """What the Round machine makes of the ledgers and votes."""
        spec, expected = self.job.optimizer, plan.microbatches_by_chunk()
        terms = StepTerms(
            step=step,
            num_steps=self.job.total_steps,
            learning_rate=learning_rate(spec, step, self.job.total_steps),
            clip_norm=spec.clip_norm,
            batch_samples=self.job.batch.samples,
        )
        ends = [path.end for path in plan.paths]
        deciding = Round(
            terms, plain_groups(plan), ends, expected=expected, epoch=_EPOCH, generation=_GENERATION
        )
        events: deque[RoundEvent] = deque(
            LedgerHeard(worker=_HERE, done=self._done(step, ref, expected[ref], losses)) for ref in self._refs
        )
        while events:
            for command in deciding.handle(events.popleft(), now=0.0):
                match command:
                    case Prepare():
                        events.append(VoteHeard(worker=_HERE, vote=self._vote(step, command)))
                    case StepRecord():
                        return command
                    case RoundFailed():
                        raise LocalError(command.reason)
        raise LocalError(f"step {step} came to no decision")

    def _done(
        self, step: Step, ref: ChunkRef, seen: tuple[MicrobatchId, ...], losses: Sequence[Loss]
    ) -> StageDone:
        here = [losses[m] for m in seen] if ref == self._refs[-1] else []
        return StageDone(
            generation=_GENERATION,
            step=step,
            ledger=Ledger(stage=ref.stage, worker=_HERE, microbatches=seen),
            loss_sum=math.fsum(loss.loss_sum for loss in here),
            tokens=tuple(loss.num_tokens for loss in here),
        )

    def _vote(self, step: Step, asked: Prepare) -> Vote:
        """A group of one member has its result in its accumulators."""
        joined = self._compute.run(JoinOp(step=step, group=asked.group, attempt=asked.attempt), {}).outcome
        assert isinstance(joined, Joined)
        return Vote(
            generation=_GENERATION,
            step=step,
            group=joined.group,
            attempt=asked.attempt,
            digest=joined.digest,
            squared_norm=joined.squared_norm,
            is_finite=joined.is_finite,
        )


def _there_and_back(microbatch: MicrobatchId, path: Path) -> Iterator[PlannedOp]:
    *before, last = (hop.stage for hop in path.hops)
    for stage in before:
        yield PlannedOp(kind=OpKind.FORWARD, stage=stage, microbatch=microbatch)
    yield PlannedOp(kind=OpKind.LOSS, stage=last, microbatch=microbatch)
    for stage in reversed(before):
        yield PlannedOp(kind=OpKind.BACKWARD, stage=stage, microbatch=microbatch)


def _op(planned: PlannedOp, step: Step, path: Path) -> Op:
    hop = path.hops.index(ChunkRef(stage=planned.stage, worker=_HERE))
    microbatch = planned.microbatch
    return COMPUTE_OPS[planned.kind](phase=Phase.TRAIN, step=step, microbatch=microbatch, hop=hop, path=path)
