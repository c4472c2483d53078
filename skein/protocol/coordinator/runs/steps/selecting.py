"""Choices of rows along the run: who picks of which rows, what is here of it, and what is recorded.

Rules of this file
- A choice is recorded before a sample of it is drawn. A coordinator that begins anew chooses anew what was not.
- Whoever dies or is late costs its own rows their choice and nobody else's: chance draws of them. Where others were
  not done either, the selection begins anew; after `MOST_TRIES` of that, chance draws of whatever is wanting.
- The second stage runs beside: until its answer comes nothing is awaited of workers.
- In an array models of rows are asked, with one choice for each: they are chosen one after the other, and recorded
  together.
- The next choice is made beside the last steps before it is due, by parameters of the first of them. Training stands
  still only for what is wanting then, or when another plan is wanted, under which some may not have these parameters.
- Under another generation rows are looked at anew, by the same parameters if they are still here.
"""

from math import inf

from skein.numeric.coreset.portions import Chosen, Picking, Portion
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, RowsChosen
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.steps.chosen import overhead_line, recorded, told_lines
from skein.protocol.coordinator.runs.steps.looking import LookAhead
from skein.protocol.coordinator.runs.steps.proposals import Proposals
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.choosing import asked_now, is_choice_due, next_look, step_of_row
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.directives import Evaluate, StepRecord, UseChoice
from skein.protocol.messages.tensors import Phase
from skein.types import Step, WorkerId

MOST_TRIES = 3


class Selecting(RunPart):
    """The choice that is made at one version; jobs that do not choose along the run never make any."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._ahead = LookAhead(members.job)
        self._due: Step | None = None
        """Version from which samples are to be drawn by what is chosen; None: nothing is."""
        self._rows: tuple[int, ...] = ()
        """Rows of an array whose models are asked; (0,) for any other job."""
        self._proposals: Proposals | None = None
        self._made: RowsChosen | None = None
        """A choice that is not recorded yet."""
        self._began_s: float | None = None
        """Time at which training stood still for it; None: it goes on."""
        self._stood_s = 0.0
        """Seconds for which it did before."""
        self._num_tries = 0
        self._chosen: dict[int, Chosen] = {}
        self._gone: set[WorkerId] = set()
        self._asked: int | None = None

    def is_due(self) -> bool:
        """Whether rows are to be chosen before anything is drawn at the job's version."""
        return is_choice_due(self._job)

    @property
    def is_choosing(self) -> bool:
        """Whether the second stage runs, for which no worker does anything."""
        return self._asked is not None

    @property
    def is_ahead(self) -> bool:
        """Whether a choice is being made, or is, that is not due yet."""
        return self._due is not None and self._job.version < self._due

    @property
    def is_behind(self) -> bool:
        """Whether a choice is being made beside steps that is not there yet."""
        return self.is_ahead and self._made is None

    def look_ahead(self, plan: Plan, *, now: float) -> None:
        """Begin to choose beside steps if it is time for that, or go on with it under another generation."""
        if self.is_ahead:
            self._ask_again()
            return
        look = self._ahead.begins()
        if look is None:
            return
        self._forget()
        self._due, self._rows = look.due, (0,)
        self._look(plan, look.version, now=now)

    def settle(self, *, now: float) -> bool:
        """Record a choice that was made beside steps, now that it is due; says whether there was one."""
        made, self._made = self._made, None
        if made is None or self._due != self._job.version:
            return False
        self.chose(made, now=now)
        return True

    def keep(self, made: RowsChosen, *, now: float) -> None:
        """A choice is made that is not to be recorded yet; of an array there are more to come, and none is kept."""
        if self._due is None or self._job.version > self._due or self._rows != (0,):
            return
        self._made, self._asked = made, None
        self._stood_s, self._began_s = self._stood_s + self._standing_s(now), None

    def begin(self, plan: Plan, *, now: float) -> None:
        """Have all rows looked at, and picked of; or go on with what was picked before a step or a generation."""
        if not self.is_ahead and self._due != self._job.version:
            self._forget()
            self._due, self._rows = self._job.version, asked_now(self._job)
        if self._began_s is None:
            self._began_s = now
            if self._proposals is not None:
                self._proposals.hurry(now=now)
        if self._proposals is None:
            self._look(plan, self._ahead.version(), now=now)
        else:
            self._ask_again()

    def _ask_again(self) -> None:
        """Have the choice made if all have picked, and nobody is at it."""
        is_complete = self._proposals is not None and not self._proposals.wanting()
        if is_complete and self._asked is None and self._made is None:
            self._ask()

    def _look(self, plan: Plan, version: Step, *, now: float) -> None:
        self._num_tries += 1
        self._gone.clear()
        self._proposals = Proposals(version, self._portions_of(plan), self._rows, now=now)
        if self._num_tries > MOST_TRIES:
            self._ask()
            return
        self._members.send_placed(
            Evaluate(
                version=version,
                num_microbatches=self._num_blocks,
                phase=Phase.SELECT,
                num_rows=self._num_rows,
            )
        )

    def picked(self, worker: WorkerId, report: CandidatesPicked, *, now: float) -> None:
        """Take a part of what a worker has picked; once nothing is wanting, choose among all."""
        if self._proposals is None or self._asked is not None or self._made is not None:
            return
        self._proposals.take(worker, report, now=now)
        if not self._proposals.wanting():
            self._ask()

    def late_at(self) -> float:
        """Time at which who has not picked is waited for no more."""
        return inf if self._proposals is None or self._asked is not None else self._proposals.late_at()

    def late(self) -> None:
        """Choose without those who have not picked yet."""
        assert self._proposals is not None
        self._proposals.leave_out("it was late")
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
        self._record(self._stood_s + self._standing_s(now), now=now)
        self._forget()
        return True

    def _record(self, seconds: float, *, now: float) -> None:
        assert self._proposals is not None
        job, look = self._job, next_look(self._job)
        is_in_time = look is not None and look.due == job.version
        wanted_at = look.version if look is not None and is_in_time else self._proposals.version
        records = {
            row: recorded(
                job,
                row,
                chosen,
                looked_at=self._proposals.version,
                num_rows=self._num_rows,
                seconds=seconds,
                num_together=len(self._rows),
                now=now,
            )
            for row, chosen in self._chosen.items()
        }
        for row, record in records.items():
            for words in told_lines(job, record, self._chosen[row], wanted_at=wanted_at):
                self._log(words)
            self._out.record(record)
            self._members.send_placed(UseChoice(choice=record.told))
        # Of an array, the share that all rows have taken together.
        if (above := overhead_line(job, records[self._rows[0]])) is not None:
            self._log(above)

    # --- what all parts are told ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, and with it what it has not picked."""
        self._gone.add(change.worker)

    def fenced(self, *, now: float) -> None:
        """Keep a choice that is made, and what was picked if only those who are gone are wanting; else begin anew."""
        self._asked = None
        if self._made is not None:
            return
        found, is_ahead = self._proposals, self.is_ahead
        wanting = () if found is None else found.wanting()
        # Beside steps there is time to look at all rows again, by whoever is left.
        is_enough = not wanting if is_ahead else set(wanting) <= self._gone
        if found is not None and len(wanting) < len(found.portions) and is_enough:
            found.leave_out("it was lost")
            self._chosen.clear()
            self._stood_s += self._standing_s(now)
            self._began_s = None
        elif is_ahead:
            self._forget()
        else:
            self._drop()
            self._began_s = None

    def _standing_s(self, now: float) -> float:
        """Seconds for which training has stood still for the choice under this generation."""
        return 0.0 if self._began_s is None else max(0.0, now - self._began_s)

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Forget a choice by parameters that do not count any more."""
        self._ahead.adopted(adoption.plan, self._members.acks)
        if adoption.gives_up:
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

    def _ask(self) -> None:
        """Have the choice made; of an array one for each row that is asked, this being the first."""
        self._chosen.clear()
        self._ask_next()

    def _ask_next(self) -> None:
        assert self._proposals is not None
        row = self._rows[len(self._chosen)]
        step = step_of_row(self._job, row) if self._job.spec.rows else self._proposals.version
        self._asked = self._out.next_request()
        self._out.do(
            ChooseRows(
                request=self._asked,
                run=self._job.job,
                portions=self._proposals.portions,
                proposed=self._proposals.of_row(row),
                picking=Picking.at(
                    self._job.spec.data.coreset,
                    step,
                    num_rows=self._num_rows,
                    block_rows=self._job.spec.batch.microbatch_samples,
                ),
            )
        )

    def _forget(self) -> None:
        self._due = self._asked = self._made = self._began_s = None
        self._num_tries = 0
        self._drop()

    def _drop(self) -> None:
        self._proposals, self._chosen, self._stood_s = None, {}, 0.0
