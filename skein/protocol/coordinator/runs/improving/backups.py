"""Copies of all stages in the memory of workers elsewhere: what is left if every holder of a stage dies at once.

Rules of this file
- All stages are copied at the same versions, for the job can only go back to a version that it has of every stage.
- Whoever keeps a copy is a member, so that it hears of roll-backs, and holds another stage, far away if it can be.
- The copies before the newest whole set may go, and not before it is whole.
- Of many walkers nothing is kept elsewhere: a stage of one is of no use to another.
- Copies that are not made as often as the job asks are told of, once for each reason.
"""

from collections.abc import Iterable, Mapping
from math import ceil

from skein.plan.load import stage_loads
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import Prefetch, Snapshot
from skein.protocol.messages.reports import Prefetched
from skein.topology.fleet import Link
from skein.types import StageIndex, StageSpec, Step, WorkerId

_PATIENCE = 5
"""Rounds that a copy may take."""


class Backups(RunPart):
    """Copies that were asked for, and the newest version of which every stage has a copy elsewhere."""

    def __init__(self, members: Members, links: Mapping[tuple[WorkerId, WorkerId], Link]) -> None:
        super().__init__(members)
        self._links = links
        self._whole = Step(0)
        self._asked = Step(0)
        self._every = self._job.spec.backup.every_steps
        self._missing: dict[Step, set[StageSpec]] = {}
        self._why = ""
        """Reason why copies came later than asked, or not at all, the last time."""

    def is_due(self) -> bool:
        """Whether the step in progress ends at a version that is to be copied."""
        version, spec = self._job.version + 1, self._job.spec
        if not (spec.backup.every_steps and spec.aggregation.walkers.have_equal_holders):
            return False
        if version < self._asked + self._every:
            return False
        # A donor keeps few snapshots: a round is given the time to end before the next one begins.
        if not self._missing or version >= self._asked + _PATIENCE * self._every:
            return True
        self._tell("those before are still on their way")
        return False

    def _tell(self, why: str) -> None:
        """Copies are late, for a reason that may have been told already."""
        if why != self._why:
            every, newest = self._job.spec.backup.every_steps, self._whole or "none"
            self._log(f"stages are not copied every {every} steps (newest copies: {newest}): {why}")
        self._why = why

    def step_begins(self, plan: Plan, candidates: Iterable[Entry], *, step_s: float | None) -> None:
        """Have the coming version copied if it is due: each stage by a holder, to one who does not hold it.

        Args:
            plan: what is held.
            candidates: who may keep copies.
            step_s: what a step takes, if that is known: copies are made so seldom that links bear them.
        """
        if not self.is_due():
            return
        version = Step(self._job.version + 1)
        keepers = _keepers(plan, [entry for entry in candidates if self._members.is_this(entry)])
        if len(keepers) < len(plan.stages):
            self._asked = version
            self._tell("every worker that could keep the copy of a stage holds that stage itself")
            return
        self._keep_to_budget(plan, keepers, step_s)
        self._asked = version
        self._missing = {version: set(plan.stages)}
        for stage in plan.stages:
            donors = plan.holders(stage.index)
            snapshot = Snapshot(version=version, stages=(stage.index,), keeps_results=False)
            self._members.send(snapshot, *donors[:1])
            prefetch = Prefetch(
                job=self._job.job,
                job_spec=self._job.spec.canonical_json(),
                stage=stage,
                version=version,
                donors=tuple(self._members.donor(donor) for donor in donors[:1]),
                is_backup=True,
                drops_before=self._whole,
            )
            self._members.tell(prefetch, keepers[stage.index])

    def _keep_to_budget(
        self, plan: Plan, keepers: Mapping[StageIndex, WorkerId], step_s: float | None
    ) -> None:
        """Set how many steps must pass until links have the time for the next copies."""
        asked = self._job.spec.backup
        loads = stage_loads(self._job.spec, plan.stages)
        seconds = 0.0
        for stage, load in zip(plan.stages, loads, strict=True):
            link = self._links.get((plan.holders(stage.index)[0], keepers[stage.index]))
            seconds = max(seconds, 0.0 if link is None else load.state_bytes / link.bytes_per_s)
        least = 0 if step_s is None else ceil(seconds / (asked.link_share * step_s))
        every = max(asked.every_steps, least)
        if every != self._every and every > asked.every_steps:
            self._tell(
                f"every {every} steps, for the slowest copy takes {seconds:.3g} s, and may take "
                f"{asked.link_share:.0%} of its link's time"
            )
        self._every = every

    def prefetched(self, report: Prefetched) -> None:
        """A copy is whole, or cannot be had: then this version will never be whole."""
        missing = self._missing.get(report.version)
        if missing is None or report.job != self._job.job:
            return
        if report.error:
            self._tell(
                f"stage {report.stage.index} at version {report.version} was not copied: {report.error}"
            )
            self._missing.clear()
            return
        missing.discard(report.stage)
        if not missing:
            self._whole = max(self._whole, report.version)
            del self._missing[report.version]
            self._why = ""

    def fenced(self, *, now: float) -> None:
        """A new generation: who was to take a snapshot has been told to forget it."""
        if self._missing:
            self._tell(f"a new generation began while version {self._asked} was copied")
        self._missing.clear()

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Forget the copies that were asked for if the plan gives steps up: their history does not count."""
        if adoption.gives_up:
            self._missing.clear()
            self._whole = min(self._whole, self._job.version)
            self._asked = Step(0)


def _keepers(plan: Plan, candidates: list[Entry]) -> dict[StageIndex, WorkerId]:
    """Keeper of each stage's copy: no holder of the stage, best far from its holders, and with fewest copies."""
    site_of = {entry.hello.worker: entry.hello.site for entry in candidates}
    kept: dict[WorkerId, int] = {}
    keepers: dict[StageIndex, WorkerId] = {}
    for stage in plan.stages:
        holders = set(plan.holders(stage.index))
        near = {site_of.get(holder) for holder in holders}
        free = [worker for worker in site_of if worker not in holders]
        if free:
            keeper = min(free, key=lambda w: (site_of[w] in near, kept.get(w, 0), w))
            kept[keeper] = kept.get(keeper, 0) + 1
            keepers[stage.index] = keeper
    return keepers
