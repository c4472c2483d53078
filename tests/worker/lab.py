"""Workers in one process without a network: computes, desks between them, and a step as a coordinator would run it."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path as FilePath

import pytest
import torch

from skein.config.data.sources import DigitsSource, TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdamWSpec
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.qwen3_moe import Qwen3MoeModel, Qwen3MoeShape
from skein.model.reduced import reduced_by_group
from skein.model.sparse.experts import ExpertPlacement
from skein.model.sparse.routing import RoutingSpec
from skein.plan.agreeing.exchange import DIRECT, Pattern
from skein.plan.plan import Group, Path
from skein.protocol.messages.directives import Decision, GroupResult, Resumption, StepRecord
from skein.protocol.messages.reports import Balance
from skein.protocol.messages.tensors import Envelope, Phase, ShardTensor
from skein.protocol.worker.keeping.desk import Desk
from skein.protocol.worker.ops import (
    ApplyOp,
    BackwardOp,
    ForwardOp,
    Joined,
    JoinOp,
    Loss,
    LossOp,
    Op,
    OpOutcome,
)
from skein.protocol.worker.reduction import Exchange, handed_out
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    GroupId,
    Incarnation,
    JobId,
    Layout,
    MicrobatchId,
    Precision,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)
from tests.support.device import DEVICE
from worker.boundary import BoundaryLog
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.compute.holding import Holding
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload, weight_bytes
from worker.data.dataset import open_dataset
from worker.mesh.mesh import Mesh

HOST = torch.device("cpu")
"""Where a worker with several devices has what it holds; these compute."""
NORM_OFF = 0.0 if DEVICE == HOST else 1e-12
GENERATION = Generation(1)
ATTEMPT = Attempt(epoch=Epoch(1), generation=GENERATION, number=0)


def write_text(folder: FilePath) -> FilePath:
    """A small deterministic text file."""
    words = ("wool", "yarn", "skein", "goose", "flock", "thread")
    text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(3000))
    path = folder / "text.txt"
    path.write_text(text)
    return path


def tiny_job(
    text: FilePath,
    *,
    is_tied: bool = True,
    stages: int = 2,
    replicas: int = 1,
    layout: Layout = Layout.LINE,
    precision: Precision = Precision.FP64,
) -> JobSpec:
    """A job of four decoder blocks of width 16 on text, with clipping low enough to act."""
    shape = LlamaShape(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    return JobSpec(
        name="tiny",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=12, validation_ratio=0.1),
        batch=BatchSpec(samples=8, microbatch_samples=2),
        parallel=ParallelSpec(stages=stages, replicas=replicas, layout=layout),
        optimizer=AdamWSpec(learning_rate=1e-2, clip_norm=0.5),
        budget=BudgetSpec(steps=10),
        evaluation=EvaluationSpec(samples=8),
        precision=precision,
        seed=5,
    )


def sparse_job(
    text: FilePath,
    *,
    stages: int = 4,
    replicas: int = 1,
    layout: Layout = Layout.LINE,
    num_chosen: int = 3,
    routing: RoutingSpec | None = None,
    placement: ExpertPlacement = ExpertPlacement.STAGE,
) -> JobSpec:
    """The same with five experts in a block, three for each token, whose balance loss counts."""
    shape = Qwen3MoeShape(
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=5,
        num_experts_per_tok=num_chosen,
        # Drawn as narrowly as usual, routers would hardly tell tokens apart.
        initializer_range=0.2,
    )
    routing = routing or RoutingSpec(balance_coefficient=0.5)
    model = Qwen3MoeModel(shape=shape, routing=routing, placement=placement)
    job = tiny_job(text, stages=stages, replicas=replicas, layout=layout)
    return job.model_copy(update={"model": model})


def digits_job(*, stages: int = 1, layout: Layout = Layout.LINE) -> JobSpec:
    """A job of a small classifier of images."""
    return JobSpec(
        name="digits",
        model=DigitsCnnModel(family="digits_cnn", channels=4, num_blocks=2),
        data=DataSpec(sources=(DigitsSource(format="digits"),)),
        batch=BatchSpec(samples=32, microbatch_samples=8),
        parallel=ParallelSpec(stages=stages, layout=layout),
        budget=BudgetSpec(steps=10),
        precision=Precision.FP64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Who holds what, which way each microbatch goes, who reduces with whom."""

    stages: tuple[StageSpec, ...]
    chunks: tuple[ChunkRef, ...]
    paths: tuple[Path, ...]
    groups: tuple[Group, ...]

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(sorted({chunk.worker for chunk in self.chunks}))


def arrange(
    job: JobSpec,
    ways: Sequence[Sequence[int]] | None = None,
    pattern: Pattern = DIRECT,
    num_holders: int | None = None,
) -> Arrangement:
    """An even cut; replica r's worker of stage s is w<r><s>, microbatches go round the replicas.

    With fewer holders than stages for each replica, they hold stages in turn. Microbatch m visits the stages
    `ways[m % len(ways)]` in that order, by default all.
    """
    num_layers = len(job.layers)
    is_loop = job.parallel.layout is Layout.LOOP
    bodies = job.parallel.stages
    body_layers = num_layers - is_loop
    bounds = [round(i * body_layers / bodies) for i in range(bodies + 1)] + [num_layers] * is_loop
    stages = tuple(
        StageSpec(index=StageIndex(i), first=first, stop=stop)
        for i, (first, stop) in enumerate(pairwise(bounds))
    )
    in_turn = num_holders or bodies
    rings = [
        tuple(
            ChunkRef(stage=stage.index, worker=WorkerId(f"w{r}{stage.index % in_turn}")) for stage in stages
        )
        for r in range(job.parallel.replicas)
    ]
    chunks = tuple(ref for ring in rings for ref in ring)
    groups = [
        Group(
            group=group,
            members=tuple(ref for ref in chunks if ref.stage in reduced.stages),
            num_shards=max(job.parallel.replicas, len(reduced.stages)),
            pattern=pattern,
        )
        for group, reduced in reduced_by_group(job.model, stages).items()
    ]
    visited = ways or [[stage.index for stage in stages]]
    paths = tuple(
        Path(hops=tuple(rings[m % len(rings)][stage] for stage in visited[m % len(visited)]))
        for m in range(job.batch.num_microbatches)
    )
    return Arrangement(stages=stages, chunks=chunks, paths=paths, groups=tuple(groups))


def _envelope(sender: WorkerId, header: ShardTensor) -> Envelope:
    return Envelope(
        job=JobId("j1"),
        epoch=Epoch(1),
        generation=GENERATION,
        sender=sender,
        incarnation=Incarnation("1"),
        header=header,
    )


class Bench:
    """One worker: its compute and its desk, and the mesh that computes for it, if one does."""

    def __init__(
        self, worker: WorkerId, job: JobSpec, arrangement: Arrangement, mesh: Mesh | None = None
    ) -> None:
        self.worker = worker
        device = DEVICE if mesh is None else HOST
        self.compute = Compute(device)
        self.desk = Desk[Payload](worker, BoundaryLog(), weigh=weight_bytes, release=())
        mine = {ref.stage for ref in arrangement.chunks if ref.worker == worker}
        origins = [
            MicrobatchId(m) for m, path in enumerate(arrangement.paths) if path.hops[0].worker == worker
        ]
        reader = None
        if 0 in mine:
            reader = BatchReader(open_dataset(job.data, job.model, seed=job.seed), job, origins)
        self.compute.hold(
            Holding(
                job_id=JobId("j1"),
                job=job,
                worker=worker,
                chunks={
                    stage.index: Chunk.drawn(job, stage, version=Step(0), device=device, mesh=mesh)
                    for stage in arrangement.stages
                    if stage.index in mine
                },
                groups=arrangement.groups,
                batches=reader,
                resumption=None,
            )
        )

    @property
    def holding(self) -> Holding:
        assert self.compute.holding is not None
        return self.compute.holding

    def hold(self, resumption: Resumption | None) -> None:
        """A new generation with the same chunks and data: of the step in progress, `resumption` stays."""
        before = self.holding
        batches = before.batches
        if batches is not None:
            every = [MicrobatchId(m) for m in range(before.job.batch.num_microbatches)]
            batches = BatchReader(batches.dataset, before.job, every)
        self.compute.hold(replace(before, batches=batches, resumption=resumption))

    def run(self, op: Op) -> Done:
        operands, _ = self.desk.take(op, GENERATION)
        return self.compute.run(op, operands)


class Lab:
    """All workers of a job; `step` runs one training step, op by op."""

    def __init__(
        self,
        job: JobSpec,
        ways: Sequence[Sequence[int]] | None = None,
        *,
        pattern: Pattern = DIRECT,
        num_holders: int | None = None,
        meshes: Mapping[str, Mesh] | None = None,
    ) -> None:
        self.job = job
        self.arrangement = arrange(job, ways, pattern, num_holders)
        self.benches = {
            worker: Bench(worker, job, self.arrangement, (meshes or {}).get(worker))
            for worker in self.arrangement.workers
        }
        self.sent: list[tuple[WorkerId, WorkerId, frozenset[str]]] = []
        """Sender, receiver and names of what travelled."""
        self.sent_bytes: Counter[tuple[WorkerId, WorkerId]] = Counter()
        """Bytes that travelled from one worker to another."""
        self.balances: list[Balance] = []
        """What routers told of each microbatch and stage of the step so far."""

    def close(self) -> None:
        for bench in self.benches.values():
            bench.compute.forget()

    def chunk(self, stage: int, replica: int = 0) -> Chunk:
        ref = [ref for ref in self.arrangement.chunks if ref.stage == stage][replica]
        holding = self.benches[ref.worker].compute.holding
        assert holding is not None
        return holding.chunks[StageIndex(stage)]

    def run(self, worker: WorkerId, op: Op, send_to: Sequence[WorkerId] = ()) -> OpOutcome:
        """Run an op and file its outputs with whom they are for."""
        done = self.benches[worker].run(op)
        for key, payload in done.outputs.items():
            for target in send_to:
                self._hand_over(worker, target, key, payload)
        return done.outcome

    def _hand_over(self, sender: WorkerId, target: WorkerId, key: object, payload: Payload) -> None:
        if target != sender:
            assert not isinstance(payload, Mapping), f"{key} was not made ready to travel"
            self.sent.append((sender, target, frozenset(tensor.name for tensor in payload)))
            self.sent_bytes[sender, target] += weight_bytes(payload)
        self.benches[target].desk.file(GENERATION, key, payload)  # type: ignore[arg-type]

    # --- a step ---

    def microbatch(self, step: Step, m: int, path: Path, phase: Phase) -> Loss:
        hops, microbatch = path.hops, MicrobatchId(m)
        for hop, (at, following) in enumerate(pairwise(hops)):
            op = ForwardOp(phase=phase, step=step, microbatch=microbatch, hop=hop, path=path)
            told = self.run(at.worker, op, [following.worker])
            if isinstance(told, Balance):
                self.balances.append(told)
        last = len(hops) - 1
        back_to = [hops[last - 1].worker] if last else []
        loss = self.run(
            hops[last].worker,
            LossOp(phase=phase, step=step, microbatch=microbatch, hop=last, path=path),
            back_to,
        )
        assert isinstance(loss, Loss)
        if loss.balance is not None:
            self.balances.append(loss.balance)
        if phase is Phase.TRAIN:
            for hop in range(last - 1, -1, -1):
                backward = BackwardOp(step=step, microbatch=microbatch, hop=hop, path=path)
                self.run(hops[hop].worker, backward, [hops[hop - 1].worker] if hop else [])
        return loss

    def reduce(self, step: Step, group: Group) -> Joined:
        """One reduction, by the machines that say who does what; the answer that all voted."""
        machines = {worker: Exchange(worker, step, ATTEMPT) for worker in group.workers}
        waiting = deque((worker, machine.prepare(group)) for worker, machine in machines.items())
        votes = []
        while waiting:
            worker, moves = waiting.popleft()
            for target, key in moves.parcels:
                payload = self.benches[worker].desk.for_sending(_envelope(worker, key))
                assert payload is not None
                self._hand_over(worker, target, key, payload)
                waiting.append((target, machines[target].arrive(key)))
            for op in moves.ops:
                done = self.benches[worker].run(op)
                if isinstance(op, JoinOp):
                    votes.append(done.outcome)
                    continue
                for target, key in handed_out(op):
                    self._hand_over(worker, target, key, done.outputs[key])
                    waiting.append((target, machines[target].arrive(key)))
        assert len(votes) == len(machines)
        first, *others = votes
        assert isinstance(first, Joined)
        for other in others:
            assert isinstance(other, Joined)
            # GPUs sum squares in an order of their own, in float64; votes of one result may differ by far more.
            assert other == replace(first, squared_norm=other.squared_norm), votes
            assert other.squared_norm == pytest.approx(first.squared_norm, rel=NORM_OFF, abs=0), votes
        return first

    def step(self, step: int, *, decision: Decision = Decision.APPLY) -> StepRecord:
        """One step from data to update; what was decided."""
        at = Step(step)
        self.balances.clear()
        losses = [self.microbatch(at, m, path, Phase.TRAIN) for m, path in enumerate(self.arrangement.paths)]
        joined = {group.group: self.reduce(at, group) for group in self.arrangement.groups}
        record = decide(self.job, at, losses, joined, self.arrangement, decision)
        if (balance := Balance.sum_of(self.balances)) is not None:
            record = replace(record, balance_loss=balance.mean, drop_ratio=balance.drop_ratio)
        for worker in self.benches:
            self.run(worker, ApplyOp(record=record))
        return record

    def evaluate(self, step: int, num_microbatches: int) -> float:
        paths = self.arrangement.paths
        losses = [
            self.microbatch(Step(step), e, paths[e % len(paths)], Phase.EVALUATE)
            for e in range(num_microbatches)
        ]
        return math.fsum(loss.loss_sum for loss in losses) / sum(loss.num_tokens for loss in losses)


def decide(
    job: JobSpec,
    step: Step,
    losses: Sequence[Loss],
    joined: Mapping[GroupId, Joined],
    arrangement: Arrangement,
    decision: Decision,
) -> StepRecord:
    """The record that a coordinator would write."""
    num_tokens = sum(loss.num_tokens for loss in losses)
    weights: dict[GroupId, float] = {}
    for group in arrangement.groups:
        visitors = [
            loss.num_tokens
            for loss, path in zip(losses, arrangement.paths, strict=True)
            if {hop.stage for hop in path.hops} & {member.stage for member in group.members}
        ]
        weights[group.group] = 1 / sum(visitors) if visitors else 0.0
    norm = math.sqrt(math.fsum(weights[g] ** 2 * vote.squared_norm for g, vote in joined.items()))
    limit = job.optimizer.clip_norm
    return StepRecord(
        step=step,
        decision=decision,
        reason="",
        results=tuple(
            GroupResult(
                group=group,
                attempt=ATTEMPT,
                digest=vote.digest,
                squared_norm=vote.squared_norm,
                weight=weights[group],
                num_tokens=0,
            )
            for group, vote in joined.items()
        ),
        loss=math.fsum(loss.loss_sum for loss in losses) / num_tokens,
        num_tokens=num_tokens,
        weight=1 / num_tokens,
        gradient_norm=norm,
        clip=1.0 if limit is None else min(1.0, limit / (norm + 1e-6)),
        learning_rate=job.optimizer.learning_rate,
        samples_after=(step + 1) * job.batch.samples,
    )
