"""Who leads: the walkers' scores on a shared probe, and what the rule makes of them.

Rules of this file
- Scores are of the version at which the exchange's step begins. All walkers are scored on the same samples.
- A leader leads one exchange: nothing is kept that a dead one could take with it.
"""

from skein.config.aggregation import Lsgd
from skein.plan.plan import Plan
from skein.plan.rounds import Leaders
from skein.protocol.history import JobHistory


class Leading:
    """Elections of one job; a job whose rule has no leaders never has any."""

    def __init__(self, job: JobHistory) -> None:
        self._job = job

    def is_due(self) -> bool:
        """Whether walkers are to be scored before the step that begins at the job's version."""
        return isinstance(self._job.spec.aggregation, Lsgd) and bool(
            self._job.spec.aggregation.due(self._job.version)
        )

    def leaders(self, plan: Plan) -> Leaders | None:
        """Who leads the exchanges of the step that begins now; None without any."""
        return None
