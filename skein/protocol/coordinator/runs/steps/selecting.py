"""Choices of rows along the run: who picks of which rows, what is here of it, and what is recorded.

Rules of this file
- A choice is recorded before a sample of it is drawn. A coordinator that begins anew chooses anew what was not.
- Whoever dies or is late costs its own rows their choice and nobody else's: chance draws of them. Where others were
  not done either, the selection begins anew; after `MOST_TRIES` of that, chance draws of whatever is wanting.
- The second stage runs beside: until its answer comes nothing is awaited of workers.
"""

from collections import Counter
from dataclasses import replace
from math import inf, isnan

from skein.errors import RemoteError
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.portions import MOST_ODD, Chosen, Picking, Portion
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, RowsChosen
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.choosing import is_choice_due, overhead, passes_until_next
from skein.protocol.log.records import CoresetChosen
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.coresets import (
    MOST_CANDIDATE_BYTES,
    CandidatesPicked,
    ToldChoice,
    candidates_of,
    fault_of_part,
)
from skein.protocol.messages.directives import Evaluate, StepRecord, UseChoice
from skein.protocol.messages.tensors import Phase
from skein.types import Step, WorkerId

LATE_RATIO = 3.0
GRACE_S = 5.0
"""A worker is late that takes so many times as long as the first half of all did, and so many seconds more."""
MOST_TRIES = 3
_PART_BYTES, _GROUP_BYTES = 512, 80
"""Memory of a part that has nothing in it, and of a group's number and count."""


class Selecting(RunPart):
    """The choice that is made at one version; jobs that do not choose along the run never make any."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._version: Step | None = None
        """At which rows are being chosen; None: they are not."""
        self._began_s = self._sent_s = self._half_s = 0.0
        self._num_tries = 0
        self._portions: dict[WorkerId, Portion] = {}
        self._parts: dict[WorkerId, dict[int, CandidatesPicked]] = {}
        self._proposed: dict[WorkerId, Candidates | str] = {}
        self._gone: set[WorkerId] = set()
        self._num_bytes = Counter[WorkerId]()
        self._asked: int | None = None

    def is_due(self) -> bool:
        """Whether rows are to be chosen before anything is drawn at the job's version."""
        return is_choice_due(self._job)

    @property
    def is_choosing(self) -> bool:
        """Whether the second stage runs, for which no worker does anything."""
        return self._asked is not None

    def begin(self, plan: Plan, *, now: float) -> None:
        """Have all rows looked at, and picked of; or go on with what was picked before a generation was opened."""
        if self._version != self._job.version:
            self._forget()
            self._version, self._began_s = self._job.version, now
        if self._portions:
            self._ask()
            return
        self._num_tries += 1
        self._gone.clear()
        self._portions = self._portions_of(plan)
        self._sent_s, self._half_s = now, 0.0
        if self._num_tries > MOST_TRIES:
            self._ask()
            return
        num_rows, size = self._num_rows, self._job.spec.batch.microbatch_samples
        blocks = -(-num_rows // size)
        self._members.send_placed(
            Evaluate(version=self._version, num_microbatches=blocks, phase=Phase.SELECT, num_rows=num_rows)
        )

    def picked(self, worker: WorkerId, report: CandidatesPicked, *, now: float) -> None:
        """Take a part of what a worker has picked; once nothing is wanting, choose among all."""
        if worker not in self._portions or report.version != self._version or self._asked is not None:
            return
        if worker in self._proposed:
            return  # What more it tells of is for nothing.
        parts = self._parts.setdefault(worker, {})
        parts[report.part] = report
        self._num_bytes[worker] += _num_bytes(report)
        if (fault := fault_of_part(report)) is not None:
            self._refuse(worker, fault)
        elif self._num_bytes.total() > MOST_CANDIDATE_BYTES:
            # Whoever tells of most by far pays, not whoever is last.
            heaviest = max(sorted(self._num_bytes), key=lambda name: self._num_bytes[name])
            self._refuse(
                heaviest, "too many candidates to keep: give a smaller fraction, or distributed: local"
            )
        if len(parts) == report.num_parts and worker not in self._proposed:
            self._proposed[worker] = _candidates([parts[i] for i in sorted(parts)])
        if 2 * len(self._proposed) >= len(self._portions) and not self._half_s:
            self._half_s = now
        if not self._wanting():
            self._ask()

    def _refuse(self, worker: WorkerId, why: str) -> None:
        """Keep nothing of what a worker has told of."""
        self._proposed[worker] = why
        self._parts.pop(worker, None)
        self._num_bytes.pop(worker, None)

    def late_at(self) -> float:
        """Time at which who has not picked is waited for no more."""
        if not self._half_s or self._asked is not None or self._version is None:
            return inf
        return self._half_s + (LATE_RATIO - 1) * (self._half_s - self._sent_s) + GRACE_S

    def late(self) -> None:
        """Choose without those who have not picked yet."""
        for worker in self._wanting():
            self._proposed[worker] = "it was late"
        self._ask()

    def is_answer(self, made: RowsChosen) -> bool:
        """Whether this is what was asked for last."""
        return made.run == self._job.job and made.request == self._asked

    def chose(self, made: RowsChosen, *, now: float) -> None:
        """Record the choice, and have samples drawn by it."""
        seconds = max(0.0, now - self._began_s)
        record = self._recorded(made.chosen, seconds=seconds, now=now)
        self._tell(record, made.chosen)
        self._out.record(record)
        self._forget()
        self._members.send_placed(UseChoice(choice=record.told))

    def _recorded(self, chosen: Chosen, *, seconds: float, now: float) -> CoresetChosen:
        """The choice as it counts: the one before stays where too many rows cannot be compared."""
        job, version, choice = self._job, self._job.version, chosen.choice
        share = overhead(job, seconds)
        fresh = ToldChoice.of(choice, version)
        record = CoresetChosen(
            job=job.job,
            version=version,
            ids=fresh.ids,
            sizes=fresh.sizes,
            digest=choice.digest,
            farness=None if isnan(choice.error) else choice.error,
            num_rows=self._num_rows,
            num_set_aside=choice.num_set_aside,
            num_by_chance=chosen.num_by_chance,
            num_faults=len(chosen.faults),
            passes=passes_until_next(job, share),
            seconds=seconds,
            overhead=share,
            wall_s=now,
        )
        if choice.num_set_aside <= MOST_ODD * self._num_rows or not job.chosen:
            return record
        last = job.chosen[-1]
        return replace(
            record,
            ids=last.ids,
            sizes=last.sizes,
            digest=last.digest,
            farness=last.farness,
            num_set_aside=last.num_set_aside,
            num_by_chance=last.num_by_chance,
            num_faults=len(chosen.faults) + 1,
        )

    def _tell(self, record: CoresetChosen, chosen: Chosen) -> None:
        weights, num_odd = record.told.read().weights, chosen.choice.num_set_aside
        self._log(
            f"step={record.version} coreset: {len(weights)} of {record.num_rows} rows, weights "
            f"{weights.min():.3g} to {weights.max():.3g}, choice {record.digest[:12]}, in {record.seconds:.1f} s"
        )
        if num_odd:
            stays = "; the choice before stays" if record.digest != chosen.choice.digest else ""
            self._log(f"step={record.version} coreset: features of {num_odd} rows are not finite{stays}")
        for worker, reason in sorted(chosen.faults.items()):
            self._log(f"step={record.version} coreset: rows of {worker} are drawn by chance: {reason}")
        share, most = record.overhead, self._job.spec.data.coreset.max_overhead
        if share is not None and share > most and record.passes:
            self._log(
                f"step={record.version} coreset: choosing took {share:.0%} of the training before, above "
                f"max_overhead of {most:.0%}: the next choice is made after {record.passes} passes"
            )

    # --- what all parts are told ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, and with it what it has not picked."""
        self._gone.add(change.worker)

    def fenced(self, *, now: float) -> None:
        """Keep what was picked if only those who are gone are wanting; otherwise begin anew."""
        self._asked = None
        wanting = self._wanting()
        if self._proposed and set(wanting) <= self._gone:
            for worker in wanting:
                self._proposed[worker] = "it was lost"
        else:
            self._drop()

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: nothing is being chosen."""
        self._forget()

    # --- inside ---

    @property
    def _num_rows(self) -> int:
        assert self._job.counted is not None, "rows are counted before they are chosen of"
        return self._job.counted.num_train_samples

    def _portions_of(self, plan: Plan) -> dict[WorkerId, Portion]:
        """Rows by the worker where their path ends."""
        ends = [path.end.worker for path in plan.evaluation_paths]
        size = self._job.spec.batch.microbatch_samples
        found = {
            worker: Portion(
                num_rows=self._num_rows,
                block_rows=size,
                num_ways=len(ends),
                ways=tuple(way for way, end in enumerate(ends) if end == worker),
            )
            for worker in sorted(set(ends))
        }
        return {worker: portion for worker, portion in found.items() if portion.has_rows}

    def _wanting(self) -> list[WorkerId]:
        return [worker for worker in self._portions if worker not in self._proposed]

    def _ask(self) -> None:
        assert self._version is not None
        self._asked = self._out.next_request()
        self._out.do(
            ChooseRows(
                request=self._asked,
                run=self._job.job,
                portions=dict(self._portions),
                proposed=dict(self._proposed),
                picking=Picking.at(self._job.spec.data.coreset, self._version, num_rows=self._num_rows),
            )
        )

    def _forget(self) -> None:
        self._version = self._asked = None
        self._num_tries = 0
        self._drop()

    def _drop(self) -> None:
        self._portions, self._parts, self._proposed = {}, {}, {}
        self._num_bytes.clear()


def _num_bytes(part: CandidatesPicked) -> int:
    """Memory that a part takes, numbers of groups as Python has them."""
    arrays = (part.ids, part.sizes, *part.factors)
    return _PART_BYTES + _GROUP_BYTES * len(part.groups) + len(part.error) + sum(map(len, arrays))


def _candidates(parts: list[CandidatesPicked]) -> Candidates | str:
    try:
        return candidates_of(parts)
    except RemoteError as error:
        return str(error)
