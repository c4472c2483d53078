"""Arrays in the cost model: a row is its count of updates and a chain over all of them; some rows diverge.

Whoever makes a row's steps, in whatever rounds: after as many updates its chain is the same, or it has made one of them
twice, or from elsewhere.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from skein.config.job import ArrayJob, JobSpec, read_spec
from skein.plan.sweeping.choosing import RowPlace, asked_rows, first_choice
from skein.protocol.messages.array_rounds import LOSS_NOT_FINITE, ArrayRound, PassKind, RowNumbers, RowScore
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.directives import Assign
from skein.protocol.messages.reports import Balance
from skein.protocol.worker.ops import ApplyOp, ComputeOp, Loss
from skein.sim.compute.executor import SimExecutor, StageTimes
from skein.sim.compute.rows import NUM_ROWS, AskedModel
from skein.sim.judging.contributions import Judge
from skein.sim.judging.invariants import Violated, Visits, initial_of
from skein.types import JobId, StageIndex, Step, WorkerId

_DIVERGES_AT = {2: (21, 40), 6: (15, 40)}
"""By the seed modulo 8, counts of updates after which a row diverges: for the first time, and if it goes on after that,
again. The latter is the last step of a first round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRow:
    """Row of an array, with the numbers that it told of last."""

    seed: int
    count: int = 0
    num_rewinds: int = 0
    retired: str = ""
    chain: str = ""

    @property
    def diverges(self) -> bool:
        """Whether its next step spoils it."""
        return self.count == _DIVERGES_AT.get(self.seed % 8, (-1, -1))[self.num_rewinds]

    @property
    def loss(self) -> float:
        """Loss of its newest step: of this history alone, and better or worse than others' from step to step."""
        return int(self.chain or "0", 16) / 16**16

    def stepped(self) -> "SimRow":
        """The row after one more update."""
        return replace(self, count=self.count + 1, chain=_linked(self.chain, self.seed, self.count))

    def numbers(self, num_tokens: int) -> RowNumbers:
        """Numbers of the row after a step that counted so many tokens."""
        return RowNumbers(
            loss=self.loss,
            num_tokens=num_tokens,
            gradient_norm=1.0,
            clip=1.0,
            learning_rate=0.1,
            num_updates=self.count,
            num_rewinds=self.num_rewinds,
            retired=self.retired,
        )


def _linked(chain: str, seed: int, count: int) -> str:
    return hashlib.blake2b(f"{chain} {seed} {count}".encode(), digest_size=8).hexdigest()


@cache
def chain_of(seed: int, count: int) -> str:
    """Chain of a row that has made so many updates, one after the other.

    >>> chain_of(1, 2) == SimRow(seed=1).stepped().stepped().chain
    True
    """
    chain = ""
    for made in range(count):
        chain = _linked(chain, seed, made)
    return chain


class SimArrays:
    """Rows of all arrays of a world, by the lineage of commits that they are after."""

    def __init__(self, row_s: float = 0.0) -> None:
        """`row_s`: seconds of a row's step that workers tell; 0: they measure none."""
        self.row_s = row_s
        self._rows: dict[str, tuple[SimRow, ...]] = {}

    def executor(self, worker: WorkerId, flops_per_s: float) -> "ArrayExecutor":
        """Executor that a worker process computes with."""
        return ArrayExecutor(self, worker, flops_per_s)

    def begin(self, lineage: str, job: ArrayJob, origins: Sequence[str | None]) -> None:
        """An array begins with rows that others have come to after these histories; None: it draws that row.

        Raises:
            Violated: a row is another trial's, or it begins elsewhere with other rows.
        """
        rows = tuple(
            SimRow(seed=row.seed)
            if row.origin is None or origin is None
            else self._rows[origin][row.origin.row]
            for row, origin in zip(job.rows, origins, strict=True)
        )
        if [row.seed for row in rows] != [row.seed for row in job.rows]:
            raise Violated(f"{rows} are to be the rows {job.rows}")
        self.commit(lineage, rows)

    def after(self, lineage: str) -> tuple[SimRow, ...]:
        """Rows after a history of commits.

        Raises:
            Violated: nobody has come to that.
        """
        if lineage not in self._rows:
            raise Violated(f"no rows are {lineage}")
        return self._rows[lineage]

    def commit(self, lineage: str, rows: tuple[SimRow, ...]) -> None:
        """Rows are what a record has made them.

        Raises:
            Violated: elsewhere they are others after the same history, or have made steps that are none of theirs.
        """
        known = self._rows.setdefault(lineage, rows)
        if known != rows:
            raise Violated(f"after {lineage} rows are {known} and {rows}")
        for row in rows:
            if row.chain != chain_of(row.seed, row.count):
                raise Violated(f"{row} is not what {row.count} steps of its own make of it")


class ArrayExecutor(SimExecutor):
    """Counts local steps where the job is an array, and does as the cost model does with any other."""

    def __init__(self, arrays: SimArrays, worker: WorkerId, flops_per_s: float) -> None:
        super().__init__(worker, flops_per_s)
        self._arrays = arrays
        self._job: ArrayJob | None = None
        self._rows: tuple[SimRow, ...] = ()
        self._copy: list[SimRow] = []

    def build(
        self,
        assign: Assign,
        given: Mapping[StageIndex, str],
        times: Mapping[StageIndex, StageTimes],
        visits: Visits,
    ) -> None:
        """Build as the cost model does; the copy stays where the ledger does."""
        super().build(assign, given, times, visits)
        job = read_spec(assign.job_spec)
        self._job = job if isinstance(job, ArrayJob) else None
        if self._job is None:
            return
        (chunk,) = self.chunks.values()
        self._rows = self._arrays.after(chunk.lineage)
        if not self._goes_on(is_carried=bool(chunk.accumulated)):
            self._copy = list(self._rows)

    def begins_rows(self, job: JobId, spec: ArrayJob, origins: Sequence[str | None]) -> None:
        """The next build begins an array."""
        self._arrays.begin(initial_of(job), spec, origins)

    def _goes_on(self, *, is_carried: bool) -> bool:
        """Whether the copy of the round in progress stays, the ledger being carried over or not."""
        return is_carried

    def draw_by(self, choice: ToldChoice) -> None:
        """Draw samples by this choice from now on: those of the rows that it names, if it names any."""
        named = {row.row for row in choice.rows}
        others = (replace(x, rows=tuple(row for row in x.rows if row.row not in named)) for x in self.choices)
        self.choices = (*(x for x in others if x.rows), choice)

    def asked(self, job: JobSpec, version: Step) -> Mapping[int, AskedModel]:
        """Models of the rows of an array that are asked."""
        if not isinstance(job, ArrayJob):
            return super().asked(job, version)
        rows = asked_rows(job.data.coreset.share, self._places(job))
        return {row: AskedModel(seed=self._rows[row].seed, step=Step(self._rows[row].count)) for row in rows}

    def _places(self, job: ArrayJob) -> list[RowPlace]:
        due = {row.row: row.until for choice in self.choices for row in choice.rows}
        first = first_choice(job.data.coreset, num_rows=NUM_ROWS, samples=job.step_batch.samples)
        return [
            RowPlace(
                count=row.count,
                is_going=not row.retired and row.count < job.array.last_step,
                due=due.get(at, first),
            )
            for at, row in enumerate(self._rows)
        ]

    def _compute(self, op: ComputeOp) -> Loss | Balance | None:
        outcome = super()._compute(op)
        if self._job is None or not isinstance(outcome, Loss):
            return outcome
        if not op.phase.trains:
            return replace(outcome, rows=tuple(RowScore(loss_sum=x.loss, num_tokens=1) for x in self._rows))
        array = ArrayRound.together([self._local_step(self._job) for _ in range(self._job.array.op_steps)])
        assert array is not None, "an op has a local step"
        return replace(outcome, num_tokens=array.num_tokens, array=array)

    def _local_step(self, job: ArrayJob) -> ArrayRound:
        before = [row.count for row in self._copy]
        ends = [job.array.last_step if x.due is None else x.due for x in self._places(job)]
        moved = [
            not row.retired and row.count < min(end, job.array.last_step)
            for row, end in zip(self._copy, ends, strict=True)
        ]
        self._copy = [self._moved(at) if moved[at] else row for at, row in enumerate(self._copy)]
        tokens = [int(row.count > was) for row, was in zip(self._copy, before, strict=True)]
        return ArrayRound(
            rows=tuple(row.numbers(n) for row, n in zip(self._copy, tokens, strict=True)),
            num_local_steps=int(any(moved)),
            pass_kind=PassKind.FUSED,
            speedup=2.0,
            step_s=self._arrays.row_s * sum(moved),
        )

    def _moved(self, at: int) -> SimRow:
        """A row after its next step, or back where its round began."""
        row, job = self._copy[at], self._job
        assert job is not None
        if not row.diverges:
            return row.stepped()
        if job.array.on_divergence == "rewind" and not row.num_rewinds:
            return replace(self._rows[at], num_rewinds=1)
        return replace(self._rows[at], num_rewinds=row.num_rewinds, retired=LOSS_NOT_FINITE)

    def _apply(self, op: ApplyOp) -> None:
        super()._apply(op)
        if self._job is None:
            return
        told = op.record.rows
        if self.is_told_true and [x.count for x in self._copy] != [x.num_updates for x in told]:
            raise Violated(f"{self.worker} applies {told} and has {self._copy}")
        (chunk,) = self.chunks.values()
        self._rows = tuple(self._copy)
        self._arrays.commit(chunk.lineage, self._rows)

    def _judge(self) -> Judge:
        # A round's weight is 1: each row divides by its own tokens.
        return super()._judge() if self._job is None else replace(super()._judge(), is_told_true=False)
