"""Exchanges by the job's rule, for the chunks that are here: from ops and shards to the rule's own calls.

Rules of this file
- A chunk is left alone until a record names the exchange: `finish` then gives the walker that takes its place.
- The digest that is voted covers what came back and what is replicated here, so that replicas which have drifted apart
  are found in that very round.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.rule import Reach
from skein.numeric.aggregate.member import (
    ExchangeKey,
    StepExchanges,
    digest_of_tensors,
    measured,
    replicated,
)
from skein.numeric.aggregate.rule import Talk, Terms
from skein.numeric.compress.compressor import Form
from skein.numeric.gradients import flatten, unflatten
from skein.numeric.sums import exact_sum
from skein.numeric.walker import Tensors, Walker
from skein.plan.agreeing.exchange import Broadcast
from skein.plan.plan import Group
from skein.protocol.messages.directives import ExchangeTerms, StepRecord
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import Joined, JoinOp, PackOp, SumOp
from skein.types import Step, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.compute.payload import placed
from worker.compute.telling import is_told, residual_norm, sent_bytes
from worker.model.base import Crossing
from worker.telling.aggregating import Gauges

_FP32_BYTES = 4


class Exchanging:
    """The exchanges of the step in progress at one worker."""

    def __init__(self, job: JobSpec, worker: WorkerId, gauges: Gauges) -> None:
        self._job = job
        self._gauges = gauges
        self._worker = worker
        self._exchanges = StepExchanges()
        self._told: dict[ExchangeKey, int] = {}
        """Bytes that one vector weighed as it was sent, of exchanges that have not been told of."""
        self._begun_with: dict[ExchangeKey, Tensor] = {}
        """Digest of what replicates, as it was when an exchange beside steps was taken."""

    def clear(self) -> None:
        """Forget all exchanges that were begun: they count for nothing any more."""
        self._exchanges.clear()
        self._told.clear()
        self._begun_with.clear()

    def committed(self, step: Step) -> None:
        """A step is over, and so are its exchanges."""
        for key in self._exchanges.committed(step):
            self._told.pop(key, None)
            self._begun_with.pop(key, None)

    def pack(self, op: PackOp, chunk: Chunk) -> dict[int, Tensors]:
        """Parts that this worker's member sends, by shard."""
        assert op.exchange is not None
        return self._pack((op.group.group, op.attempt), op.step, op.group, op.exchange, chunk)

    def _pack(
        self, key: ExchangeKey, step: Step, group: Group, exchange: ExchangeTerms, chunk: Chunk
    ) -> dict[int, Tensors]:
        me = self._place(group)
        dues = self._job.aggregation.dues_at(exchange.due_step, num_steps=exchange.num_steps)
        index = next(
            i for i, due in enumerate(dues) if (due.reach, due.fragment) == (exchange.reach, group.fragment)
        )
        leader = group.pattern.leader if isinstance(group.pattern, Broadcast) else None
        talk = Talk(
            due=dues[index],
            num_members=len(group.members),
            me=me,
            num_shards=group.num_shards,
            weights=group.weights_by_shard,
            leader=leader,
        )
        if exchange.taken_at is not None:
            said = digest_of_tensors(self._replicated(chunk))
            self._begun_with[key] = torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)
            sent = self._exchanges.take(key, chunk.rule, chunk.walker, talk, order=index, ends_with=step)
        else:
            terms = Terms(step=step, learning_rate=exchange.learning_rate, gradient_scale=exchange.scales[me])
            sent = self._exchanges.pack(
                key, chunk.rule, chunk.walker, chunk.gradients(), terms, talk, order=index
            )
        if is_told(chunk.rule, dues[index]):
            self._told[key] = sent_bytes(sent, talk)
        if leader is not None:
            self._gauges.led(group.members[leader].worker, of=f"{exchange.reach} of {chunk.stage.index}")
        return sent

    def form(self, op: SumOp | JoinOp, shard: int, chunk: Chunk) -> Form | None:
        """Form of what peers send for an op; None while this worker has sent nothing itself."""
        key = (op.group.group, op.attempt)
        if key not in self._exchanges:
            return None
        return self._exchanges.form(key, chunk.rule, shard, is_result=isinstance(op, JoinOp))

    def combine(self, op: SumOp, chunk: Chunk, parts: Sequence[Tensors]) -> Tensors:
        """The result of a shard that this worker owns."""
        return self._exchanges.combine((op.group.group, op.attempt), chunk.rule, op.shard, parts)

    def join(self, op: JoinOp, chunk: Chunk, results: Mapping[int, Tensors]) -> tuple[Joined, Tensor]:
        """Joined results of an exchange, measured; a member alone in its group sends to nobody, and is here at once."""
        key = (op.group.group, op.attempt)
        if key not in self._exchanges:
            assert op.exchange is not None
            sent = self._pack(key, op.step, op.group, op.exchange, chunk)
            results = {
                shard: self._exchanges.combine(key, chunk.rule, shard, [sent[shard]])
                for shard in sorted(sent)
            }
        flat = self._exchanges.join(key, chunk.rule, results)
        if key in self._told:
            self._tell(key, flat, chunk)
        vote = measured(flat, self._known(op, chunk))
        joined = Joined(
            group=op.group.group,
            digest=vote.digest,
            squared_norm=vote.squared_norm,
            is_finite=vote.is_finite,
        )
        return joined, flat

    def _tell(self, key: ExchangeKey, flat: Tensor, chunk: Chunk) -> None:
        """Tell the gauges how many bytes an exchange sent, and how far it found this walker from the others."""
        self._gauges.exchanged(plain_bytes=_FP32_BYTES * flat.numel(), sent_bytes=self._told[key])
        walker, due = self._exchanges.walker(key), self._exchanges.talk(key).due
        away = chunk.rule.distance(walker, due, flat)
        if away is not None:
            self._gauges.consensus_distance[chunk.stage.index] = away

    def is_to_check(self, op: JoinOp) -> bool:
        """Whether this worker is to compute the leader's score again from what it has received."""
        return op.exchange is not None and self._worker in op.exchange.checkers

    def _known(self, op: JoinOp, chunk: Chunk) -> list[Tensor]:
        """Tensors that all members should hold alike before the exchange; none unless it reaches all."""
        if op.exchange is None or op.exchange.reach is not Reach.ALL:
            return []
        # What goes on beside steps is joined by some before and by others after what replicates changes.
        begun_with = self._begun_with.get((op.group.group, op.attempt))
        return self._replicated(chunk) if begun_with is None else [begun_with]

    def _replicated(self, chunk: Chunk) -> list[Tensor]:
        is_one = self._job.aggregation.walkers.have_equal_holders
        return [tensor for _, tensor in replicated(chunk.rule, chunk.walker, is_one=is_one)]

    def _place(self, group: Group) -> int:
        return next(i for i, member in enumerate(group.members) if member.worker == self._worker)

    def finish(self, record: StepRecord, chunk: Chunk, *, beside: bool) -> Walker | None:
        """The chunk's walker after the exchanges that `record` names; None if it takes part in none.

        Args:
            record: the decision on a step.
            chunk: at the version that the step began with; with `beside`, after its own step.
            beside: the exchanges that went on beside steps, whose result changes the chunk's walker itself; else those
                of this very step, which give another walker.
        """
        results = ((x.group, x.attempt) for x in record.results)
        keys = self._exchanges.named(results, chunk.stage.index, beside=beside)
        if not keys:
            return None
        terms = Terms(step=record.step, learning_rate=record.learning_rate, gradient_scale=record.clip)
        walker = self._exchanges.finish(keys, chunk.rule, terms)
        kept = residual_norm(chunk.rule, walker) if any(key in self._told for key in keys) else None
        if kept is not None:
            self._gauges.error_feedback_norm[chunk.stage.index] = kept
        return walker


def claim_of(chunk: Chunk) -> str:
    """The digest that is voted by whoever has received the parameters that this chunk has now."""
    return digest_of_tensors([flatten(chunk.walker.params)])


def loss_on_probe(chunk: Chunk, flat: Tensor, step: Step, batches: BatchReader | None) -> float:
    """Mean loss of other parameters than the chunk's own on the probe of `step`; only of a whole model."""
    assert batches is not None, "who checks a leader reads data"
    own = {name: param.clone() for name, param in chunk.walker.params.items()}
    losses: list[tuple[float, int]] = []
    with ExitStack() as undo, torch.no_grad():
        undo.callback(chunk.put_parameters, own)
        chunk.put_parameters(unflatten(flat, chunk.walker.params))
        for microbatch in batches.probe_microbatches():
            inputs, labels = placed(batches.batch(Phase.PROBE, step, microbatch), flat.device)
            total, num_valid = chunk.functions.score(Crossing(inputs), labels.labels)
            losses.append((total.item(), num_valid))
    return exact_sum(loss for loss, _ in losses) / max(1, sum(tokens for _, tokens in losses))
