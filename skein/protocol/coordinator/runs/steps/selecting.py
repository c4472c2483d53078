"""Choices of rows along the run: who picks of which rows, what is here of it, and what is recorded.

Rules of this file
- A choice is recorded before a sample of it is drawn. A coordinator that begins anew chooses anew what was not.
- Whoever dies or is late costs its own rows their choice and nobody else's: chance draws of them. Where others were
  not done either, the selection begins anew; after `MOST_TRIES` of that, chance draws of whatever is wanting.
- The second stage runs beside: until its answer comes nothing is awaited of workers.
- In an array models of rows are asked, with one choice for each: its one worker picks for all at once, they are chosen
  one after the other, and recorded together. Who has not picked for all of them has not picked.
- Where a plan leaves its workers idle long enough, the next choice is made beside the last steps before it is due, by
  parameters of the first of them. Training stands still only for what is wanting then; a generation that is opened
  meanwhile has it made before the step, as where there is no room.
"""

from collections import Counter
from dataclasses import replace
from math import ceil, inf, isnan

from skein.errors import RemoteError
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.portions import MOST_ODD, Chosen, Picking, Portion
from skein.plan.clock.idle import steps_beside
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, RowsChosen
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.choosing import (
    asked_now,
    choice_before,
    choice_due_at,
    drawn_by,
    is_choice_due,
    overhead,
    passes_until_next,
    step_of_row,
)
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
_Place = tuple[WorkerId, int]
"""Worker, and row of an array whose model it asks; of any other job 0."""
_PART_BYTES, _GROUP_BYTES = 512, 80
"""Memory of a part that has nothing in it, and of a group's number and count."""


class Selecting(RunPart):
    """The choice that is made at one version; jobs that do not choose along the run never make any."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._version: Step | None = None
        """Version of the parameters by which rows are being chosen; None: they are not."""
        self._due: Step | None = None
        """Version from which samples are to be drawn by that."""
        self._made: RowsChosen | None = None
        """A choice that is not due yet."""
        self._passed_by: Step | None = None
        """Version whose choice is not made beside steps: that was tried, or there is no room."""
        self._room: tuple[Plan, int | None] | None = None
        self._told: Plan | None = None
        """Plan of which it was told that it has no room."""
        self._began_s: float | None = None
        """Time at which training stood still for it; None: it goes on."""
        self._stood_s = 0.0
        """Seconds for which it did under an earlier generation."""
        self._looked_s = self._sent_s = self._half_s = 0.0
        self._took_s = 0.0
        """Seconds of the last choice, from when rows began to be looked at."""
        self._num_tries = 0
        self._portions: dict[WorkerId, Portion] = {}
        self._rows: tuple[int, ...] = ()
        """Rows of an array whose models are asked; (0,) for any other job."""
        self._parts: dict[_Place, dict[int, CandidatesPicked]] = {}
        self._proposed: dict[_Place, Candidates | str] = {}
        self._chosen: dict[int, Chosen] = {}
        self._gone: set[WorkerId] = set()
        self._num_bytes = Counter[_Place]()
        self._asked: int | None = None

    def is_due(self) -> bool:
        """Whether rows are to be chosen before anything is drawn at the job's version."""
        return is_choice_due(self._job)

    @property
    def is_choosing(self) -> bool:
        """Whether the second stage runs, for which no worker does anything."""
        return self._asked is not None

    def look_ahead(self, plan: Plan, *, now: float) -> None:
        """Begin to choose beside steps if it is time for that: the plan has room for it from here on, and just so."""
        due_at, version = choice_due_at(self._job), self._job.version
        if due_at is None or not version < due_at < self._job.total_steps:
            return
        if due_at in (self._due, self._passed_by) or not self._may_go_on_beside:
            return
        since = self._job.chosen[-1].version if self._job.chosen else 0
        most, wanted = (due_at - since) // 2, self._steps_beside(plan)
        if wanted is None or wanted > most:
            self._pass_by(due_at, plan)
        elif 2 * (due_at - version) < wanted:
            self._passed_by = due_at  # of a generation that began too late for it
        elif due_at - version <= min(most, max(wanted, self._steps_before())):
            self._forget()
            self._due, self._rows = due_at, (0,)
            self._look(plan, now=now)

    @property
    def _may_go_on_beside(self) -> bool:
        """Whether the job may choose beside steps: rounds of an array leave nobody idle."""
        return self._job.spec.data.coreset.beside and not self._job.spec.rows

    def _pass_by(self, due_at: Step, plan: Plan) -> None:
        self._passed_by = due_at
        if self._told is not plan:
            self._told = plan
            self._log(
                f"step={self._job.version} coreset: the plan leaves workers idle for too little of the steps "
                f"between two choices: rows are chosen before step {due_at}, not beside others"
            )

    def _steps_beside(self, plan: Plan) -> int | None:
        if self._room is None or self._room[0] is not plan:
            self._room = plan, steps_beside(plan, self._num_blocks)
        return self._room[1]

    def _steps_before(self) -> int:
        """Steps that go by while a choice is made, candidates picked and all, if it takes as long as the last."""
        step_s = self._job.clock.step_s
        return ceil(self._took_s / step_s) if step_s else 0

    def settle(self, *, now: float) -> bool:
        """Record a choice that was made beside steps, now that it is due; says whether there was one."""
        made, self._made = self._made, None
        if made is None or self._due != self._job.version:
            return False
        self.chose(made, now=now)
        return True

    def keep(self, made: RowsChosen, *, now: float) -> None:
        """A choice is made, and not due yet; one that is due comes too late where the run waits for something else."""
        if self._due is None or self._job.version >= self._due:
            return
        self._made, self._asked = made, None
        self._took_s = max(0.0, now - self._looked_s)

    def begin(self, plan: Plan, *, now: float) -> None:
        """Have all rows looked at, and picked of; or go on with what was picked before a step or a generation."""
        if self._due != self._job.version:
            self._forget()
            self._due, self._rows = self._job.version, asked_now(self._job)
        if self._began_s is None:
            # Nobody hurries beside steps: whoever is late is so from now on.
            self._began_s = self._sent_s = now
            self._half_s = now if self._half_s else 0.0
        if not self._portions:
            self._look(plan, now=now)
        elif self._asked is None and not self._wanting():
            self._ask()

    def _look(self, plan: Plan, *, now: float) -> None:
        self._version = self._job.version
        self._num_tries += 1
        self._gone.clear()
        self._portions = self._portions_of(plan)
        self._looked_s = self._sent_s = now
        self._half_s = 0.0
        if self._num_tries > MOST_TRIES:
            self._ask()
            return
        self._members.send_placed(
            Evaluate(
                version=self._version,
                num_microbatches=self._num_blocks,
                phase=Phase.SELECT,
                num_rows=self._num_rows,
            )
        )

    def picked(self, worker: WorkerId, report: CandidatesPicked, *, now: float) -> None:
        """Take a part of what a worker has picked; once nothing is wanting, choose among all."""
        place = (worker, report.row)
        if worker not in self._portions or report.version != self._version:
            return
        if self._asked is not None or self._made is not None:
            return
        if report.row not in self._rows or place in self._proposed:
            return  # What more it tells of is for nothing.
        parts = self._parts.setdefault(place, {})
        parts[report.part] = report
        self._num_bytes[place] += _num_bytes(report)
        if (fault := fault_of_part(report)) is not None:
            self._refuse(place, fault)
        elif self._num_bytes.total() > MOST_CANDIDATE_BYTES:
            # Whoever tells of most by far pays, not whoever is last.
            heaviest = max(sorted(self._num_bytes), key=lambda at: self._num_bytes[at])
            self._refuse(
                heaviest, "too many candidates to keep: give a smaller fraction, or distributed: local"
            )
        if len(parts) == report.num_parts and place not in self._proposed:
            self._proposed[place] = _candidates([parts[i] for i in sorted(parts)])
        if 2 * (len(self._portions) - len(self._wanting())) >= len(self._portions) and not self._half_s:
            self._half_s = now
        if not self._wanting():
            self._ask()

    def _refuse(self, place: _Place, why: str) -> None:
        """Keep nothing of what a worker has told of."""
        self._proposed[place] = why
        self._parts.pop(place, None)
        self._num_bytes.pop(place, None)

    def late_at(self) -> float:
        """Time at which who has not picked is waited for no more."""
        if not self._half_s or self._asked is not None or self._version is None:
            return inf
        return self._half_s + (LATE_RATIO - 1) * (self._half_s - self._sent_s) + GRACE_S

    def late(self) -> None:
        """Choose without those who have not picked yet."""
        self._leave_out("it was late")
        self._ask()

    def is_answer(self, made: RowsChosen) -> bool:
        """Whether this is what was asked for last."""
        return made.run == self._job.job and made.request == self._asked

    def chose(self, made: RowsChosen, *, now: float) -> bool:
        """Record the choice, and have samples drawn by it; False: of an array, another row's is to be made yet."""
        self._chosen[self._rows[len(self._chosen)]] = made.chosen
        if len(self._chosen) < len(self._rows):
            self._ask_next()
            return False
        # What a death took is none of a choice's cost, or one would have all later choices come half as often.
        seconds = self._stood_s + self._standing_s(now)
        if self._began_s is not None:
            self._took_s = max(0.0, now - self._looked_s)
        records = [self._recorded(row, x, seconds=seconds, now=now) for row, x in self._chosen.items()]
        for record, chosen in zip(records, self._chosen.values(), strict=True):
            self._tell(record, chosen)
            self._out.record(record)
            self._members.send_placed(UseChoice(choice=record.told))
        self._tell_overhead(records[0])  # it is that of all
        self._forget()
        return True

    def _recorded(self, row: int, chosen: Chosen, *, seconds: float, now: float) -> CoresetChosen:
        """The choice as it counts: the one before stays where too many rows cannot be compared.

        `seconds`: of the choices of all rows of an array, whose time each has its part of.
        """
        job, version, choice = self._job, self._job.version, chosen.choice
        share = overhead(job, seconds, row)
        fresh, passes = ToldChoice.of(choice, version), passes_until_next(job, share, row)
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
            passes=passes,
            seconds=seconds / len(self._rows),
            overhead=share,
            wall_s=now,
            rows=drawn_by(job, row, passes=passes, num_picks=fresh.num_picks),
            num_steps_beside=version - (version if self._version is None else self._version),
        )
        last = choice_before(job, row)
        if choice.num_set_aside <= MOST_ODD * self._num_rows or last is None:
            return record
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
        num_steps = record.num_steps_beside
        took = f"{record.seconds:.1f} s" + (f", beside {num_steps} steps" if num_steps else "")
        whose = f"trial {', '.join(self._trial(x.row) for x in record.rows)}: " if record.rows else ""
        at = f"step={record.version} coreset: {whose}"
        self._log(
            f"{at}{len(weights)} of {record.num_rows} rows, weights "
            f"{weights.min():.3g} to {weights.max():.3g}, choice {record.digest[:12]}, in {took}"
        )
        if num_odd:
            stays = "; the choice before stays" if record.digest != chosen.choice.digest else ""
            self._log(f"{at}features of {num_odd} rows are not finite{stays}")
        for worker, reason in sorted(chosen.faults.items()):
            self._log(f"{at}rows of {worker} are drawn by chance: {reason}")

    def _tell_overhead(self, record: CoresetChosen) -> None:
        share, most = record.overhead, self._job.spec.data.coreset.max_overhead
        if share is not None and share > most and record.passes:
            self._log(
                f"step={record.version} coreset: choosing took {share:.0%} of the training before, above "
                f"max_overhead of {most:.0%}: the next choice is made after {record.passes} passes"
            )

    def _trial(self, row: int) -> str:
        return str(self._job.spec.rows[row].trial)

    # --- what all parts are told ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, and with it what it has not picked."""
        self._gone.add(change.worker)

    def fenced(self, *, now: float) -> None:
        """Keep what was picked if only those who are gone are wanting; otherwise begin anew."""
        self._asked = None
        if self._due is not None and self._job.version < self._due:
            self._give_up_beside()
            return
        wanting = self._wanting()
        if len(wanting) < len(self._portions) and set(wanting) <= self._gone:
            self._leave_out("it was lost")
            self._chosen.clear()
            self._stood_s += self._standing_s(now)
        else:
            self._drop()
        self._began_s = None

    def _standing_s(self, now: float) -> float:
        """Seconds for which training has stood still for the choice under this generation."""
        return 0.0 if self._began_s is None else max(0.0, now - self._began_s)

    def _give_up_beside(self) -> None:
        """A choice that is complete stays; any other is made before the step."""
        if self._made is None:
            self._passed_by = self._due
            self._forget()

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Forget a choice by parameters that do not count any more."""
        if adoption.gives_up:
            self._passed_by = None
            self._forget()

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: nothing is being chosen that was due before it."""
        if self._due is not None and self._job.version > self._due:
            self._forget()

    # --- inside ---

    @property
    def _num_blocks(self) -> int:
        return -(-self._num_rows // self._job.spec.batch.microbatch_samples)

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
        """Workers that have not picked for all rows."""
        return [
            worker
            for worker in self._portions
            if any((worker, row) not in self._proposed for row in self._rows)
        ]

    def _leave_out(self, why: str) -> None:
        """Go on without what is wanting."""
        for worker in self._wanting():
            for row in self._rows:
                self._proposed.setdefault((worker, row), why)

    def _ask(self) -> None:
        """Have the choice made; of an array one for each row that is asked, this being the first."""
        self._chosen.clear()
        self._ask_next()

    def _ask_next(self) -> None:
        assert self._version is not None
        row = self._rows[len(self._chosen)]
        step = step_of_row(self._job, row) if self._job.spec.rows else self._version
        self._asked = self._out.next_request()
        self._out.do(
            ChooseRows(
                request=self._asked,
                run=self._job.job,
                portions=dict(self._portions),
                proposed={worker: x for (worker, by), x in self._proposed.items() if by == row},
                picking=Picking.at(self._job.spec.data.coreset, step, num_rows=self._num_rows),
            )
        )

    def _forget(self) -> None:
        self._version = self._due = self._asked = self._made = self._began_s = None
        self._num_tries = 0
        self._drop()

    def _drop(self) -> None:
        self._portions, self._parts, self._proposed, self._chosen = {}, {}, {}, {}
        self._num_bytes.clear()
        self._stood_s = 0.0


def _num_bytes(part: CandidatesPicked) -> int:
    """Memory that a part takes, numbers of groups as Python has them."""
    arrays = (part.ids, part.sizes, *part.factors)
    return _PART_BYTES + _GROUP_BYTES * len(part.groups) + len(part.error) + sum(map(len, arrays))


def _candidates(parts: list[CandidatesPicked]) -> Candidates | str:
    try:
        return candidates_of(parts)
    except RemoteError as error:
        return str(error)
