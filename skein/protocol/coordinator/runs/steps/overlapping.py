"""Exchanges that go on beside steps: asked for when members are at a version, and ended by the record of a later step.

Rules of this file
- Which exchanges are on their way at a step follows from the job alone. After a new generation nothing of them is left
  anywhere, so what is still wanted is asked for anew.
- The last step exchanges everything, so nothing is begun that would not have ended before it.
"""

from dataclasses import dataclass, field

from skein.config.rule import Due, Reach
from skein.plan.agreeing.rounds import exchange_of_all, weighed
from skein.plan.plan import Group, Plan
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.messages.directives import ExchangeTerms, Prepare
from skein.protocol.messages.reports import Vote
from skein.protocol.rounds.round import RoundFailed
from skein.protocol.rounds.votes import ruling, votes_text
from skein.types import Attempt, GroupId, Step, WorkerId


@dataclass(slots=True)
class _Open:
    """An exchange on its way: the step whose record ends it, and who has voted."""

    group: Group
    attempt: Attempt
    ends_with: Step
    votes: dict[WorkerId, Vote] = field(default_factory=dict)

    @property
    def result(self) -> Vote | None:
        """The vote that stands for all, once all are here."""
        return (
            self.votes[self.group.members[0].worker] if len(self.votes) == len(self.group.workers) else None
        )


class Overlapping(RunPart):
    """The exchanges of one job that are on their way in this generation."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._rule = self._job.spec.aggregation
        self._open: dict[GroupId, _Open] = {}

    def fenced(self, *, now: float) -> None:
        """A new generation: members have forgotten all of it."""
        self._open.clear()

    def begin(self, plan: Plan) -> None:
        """A step begins at the job's version: ask for what is wanted by now and not on its way."""
        step = self._job.version
        self._open = {name: x for name, x in self._open.items() if x.ends_with >= step}
        lag = self._rule.lag_steps
        for due_step in range(max(0, step - lag), step):
            ends_with = Step(due_step + lag)
            if ends_with + 1 >= self._job.total_steps:
                continue
            for due in self._rule.due(due_step):
                for group in plan.groups:
                    self._ask(group, due, Step(due_step), ends_with)

    def _ask(self, base: Group, due: Due, due_step: Step, ends_with: Step) -> None:
        group = exchange_of_all(base, due, self._rule)
        if group.group in self._open:
            return
        if self._job.learned:
            group = weighed(group, self._job.learned)
        history = self._out.history
        attempt = Attempt(epoch=history.epoch, generation=self._job.generation, number=int(due_step))
        self._open[group.group] = _Open(group, attempt, ends_with)
        prepare = Prepare(
            step=ends_with,
            group=group,
            attempt=attempt,
            parts=(),
            exchange=ExchangeTerms(
                reach=Reach.ALL,
                learning_rate=0.0,
                scales=(),
                due_step=due_step,
                num_steps=self._job.total_steps,
                taken_at=self._job.version,
            ),
        )
        self._members.send(prepare, *group.workers)

    def ending(self) -> tuple[GroupId, ...]:
        """Groups whose results the record of the step that begins now is to have."""
        return tuple(name for name, x in self._open.items() if x.ends_with == self._job.version)

    def results(self) -> tuple[Vote, ...]:
        """Results of the groups of `ending` that are here already."""
        found = (self._open[name].result for name in self.ending())
        return tuple(vote for vote in found if vote is not None)

    def voted(self, worker: WorkerId, vote: Vote) -> Vote | RoundFailed | None:
        """Take a vote on an exchange that is on its way; its result if that ends with this step and is complete.

        A disagreement ends the round: everybody is at a version that is agreed on, so the exchange begins anew.
        """
        found = self._open.get(vote.group)
        if found is None or vote.attempt != found.attempt or worker not in found.group.workers:
            return None
        found.votes[worker] = vote
        result = found.result
        if result is None:
            return None
        agreed = ruling(found.group, found.votes, is_common=True)
        if agreed.result is None or agreed.outvoted:
            reason = f"holders of {vote.group} disagree on its result: {votes_text(found.group, found.votes)}"
            blamed = agreed.outvoted or found.group.workers
            return RoundFailed(reason=reason, blamed=blamed, is_disputed=not agreed.outvoted)
        return result if found.ends_with == self._job.version else None

    def is_on_its_way(self, vote: Vote) -> bool:
        """Whether a vote is on one of these."""
        return vote.group in self._open
