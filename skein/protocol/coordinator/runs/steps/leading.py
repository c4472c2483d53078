"""Leaders of exchanges: the walkers' scores on a shared probe, and what the rule makes of them.

Rules of this file
- Scores are of the version at which the exchange's step begins. All walkers are scored on the same samples.
- Digests are told with the scores, before anybody gets parameters. Followers vote the digest of what they received, and
  some of them its loss on the probe.
- A leader leads one exchange: nothing is kept that a dead one could take with it, but which workers have lied.
"""

from collections.abc import Mapping

from skein.plan.agreeing import election
from skein.plan.agreeing.exchange import Broadcast
from skein.plan.agreeing.rounds import Leaders
from skein.plan.agreeing.walkers import walkers_of
from skein.plan.plan import Group, Plan
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.messages.directives import Evaluate
from skein.protocol.messages.reports import EvaluationDone, Vote
from skein.protocol.messages.tensors import Phase
from skein.types import GroupId, SiteId, Step, WorkerId


class Leading(RunPart):
    """Elections of one job; a job whose rule has no leaders never has any. Walkers go by the worker of their head."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._leadership = self._job.spec.aggregation.leadership
        self._claims: dict[int, election.Claim[int]] = {}
        self._version: Step | None = None
        """At which the claims are, all of them being here."""
        self._num_microbatches = 0
        self._leader: WorkerId | None = None
        self._checks: dict[GroupId, dict[WorkerId, bool]] = {}
        self._heads: dict[int, WorkerId] = {}
        self._doubted: set[WorkerId] = set()
        self._liars: set[WorkerId] = set()

    def is_due(self, *, num_validation_samples: int) -> bool:
        """Whether walkers are to be scored before the step that begins at the job's version."""
        if self._leadership is None or num_validation_samples < 1:
            return False
        return self._version != self._job.version and bool(self._job.spec.aggregation.due(self._job.version))

    def begin(self, plan: Plan) -> None:
        """Have all walkers scored at the job's version."""
        assert self._leadership is not None
        self._claims.clear()
        self._version = None
        num_walkers = len(plan.evaluation_paths)
        blocks = -(-self._leadership.probe_samples // self._job.spec.batch.microbatch_samples)
        self._num_microbatches = blocks * num_walkers
        self._members.send_placed(
            Evaluate(
                version=self._job.version,
                num_microbatches=self._num_microbatches,
                phase=Phase.PROBE,
            )
        )

    def is_complete(self, worker: WorkerId, report: EvaluationDone, plan: Plan) -> bool:
        """Take a walker's score from the worker of its head; whether all are here."""
        num_walkers = len(plan.evaluation_paths)
        if report.version != self._job.version or not report.microbatches:
            return False
        walker = report.microbatches[0] % num_walkers
        if plan.evaluation_paths[walker].end.worker != worker:
            return False
        score = report.loss_sum / report.num_tokens if report.num_tokens else float("inf")
        self._claims.setdefault(
            walker, election.Claim(walker=walker, step=self._job.version, score=score, digest=report.digest)
        )
        if len(self._claims) < num_walkers:
            return False
        self._version = self._job.version
        return True

    def fenced(self, *, now: float) -> None:
        """Forget all claims, for another plan may number walkers otherwise."""
        self._claims.clear()
        self._version = None

    def leaders(self, plan: Plan, sites: Mapping[WorkerId, SiteId]) -> Leaders | None:
        """Leaders of the exchanges of the step that begins now; None without scores, or without a finite one."""
        if self._version != self._job.version or self._leadership is None:
            return None
        walkers = walkers_of(plan)
        self._heads = {i: walker[-1].worker for i, walker in enumerate(walkers)}
        scores = election.scores_of(self._claims.values(), self._job.version)
        liars = {i for i, walker in enumerate(walkers) if walker[-1].worker in self._liars}
        best = election.elect(scores, liars)
        if best is None:
            return None
        site_by_walker = [sites.get(walker[0].worker) for walker in walkers]
        of_group = []
        for walker, site in enumerate(site_by_walker):
            near = {other: score for other, score in scores.items() if site_by_walker[other] == site}
            leader = election.elect(near, liars)
            of_group.append(walker if leader is None else leader)
        self._tell(walkers[best][-1].worker, scores[best][0])
        self._checks.clear()
        return Leaders(of_all=best, of_group=tuple(of_group))

    def main(self, plan: Plan) -> int:
        """The walker that led last, by its place in `plan`; the first one, if that is not there or nobody led."""
        if self._leadership is None or self._leader in self._liars:
            return 0
        heads = [walker[-1].worker for walker in walkers_of(plan)]
        return heads.index(self._leader) if self._leader in heads else 0

    def checkers(self, group: Group) -> tuple[WorkerId, ...]:
        """Followers that are to compute the leader's score again: a few at random, all of a leader that is doubted.

        Only a whole model can be scored by whoever has received it.
        """
        pattern, spec = group.pattern, self._job.spec
        if self._leadership is None or not isinstance(pattern, Broadcast) or spec.parallel.is_cut:
            return ()
        leader = group.members[pattern.leader].worker
        followers = [member.worker for member in group.members if member.worker != leader]
        ratio = 1.0 if leader in self._doubted else self._leadership.recheck_ratio
        return election.rechecking(spec.seed, self._job.version, followers, ratio=ratio)

    def doubts(self, worker: WorkerId, vote: Vote, group: Group) -> WorkerId | None:
        """Take what a follower says of its leader's parameters; the leader's worker once it is found to have lied.

        One accuser makes all followers check this leader the next time; more than half of them convict it.
        """
        pattern = group.pattern
        if self._leadership is None or not isinstance(pattern, Broadcast):
            return None
        leader = group.members[pattern.leader].worker
        claim = next((x for x in self._claims.values() if self._heads.get(x.walker) == leader), None)
        if claim is None or worker == leader:
            return None
        is_true = not claim.digest or vote.digest == claim.digest
        if is_true and vote.probe_loss is not None:
            is_true = election.bears_out(claim, vote.probe_loss)
        checks = self._checks.setdefault(vote.group, {})
        checks[worker] = is_true
        if not is_true:
            self._doubted.add(leader)
        if not election.is_refuted(checks, num_followers=len(group.members) - 1):
            return None
        self._liars.add(leader)
        self._log(f"step={vote.step} leader={leader} is not what it claimed")
        return leader

    def _tell(self, leader: WorkerId, score: float) -> None:
        if leader != self._leader:
            self._log(f"step={self._job.version} leader={leader} probe_loss={score:.4f}")
        self._leader = leader
