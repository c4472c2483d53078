"""Loss on validation data: when it is due, and the sum of what the heads report."""

from skein.protocol.history import JobHistory
from skein.protocol.messages import EvaluationDone
from skein.protocol.ops import Loss, exact_sum
from skein.types import WorkerId


class Evaluation:
    """The evaluation of one version at a time. `num_validation_samples` is what every origin has."""

    def __init__(self, job: JobHistory) -> None:
        self.num_validation_samples = 0
        self.num_microbatches = 0
        self._job = job
        self._reports: dict[tuple[WorkerId, int], EvaluationDone] = {}

    def is_due(self) -> bool:
        """Whether the job's version is to be evaluated and was not."""
        spec, version, last = self._job.spec, self._job.version, self._job.last_evaluation
        if (last is not None and last.version == version) or not self._available():
            return False
        every = spec.evaluation.every_steps
        return version >= spec.budget.steps or (bool(every) and version % every == 0)

    def begin(self) -> int:
        """Forget older reports; gives how many microbatches to evaluate."""
        self._reports.clear()
        self.num_microbatches = self._available()
        return self.num_microbatches

    def take(self, worker: WorkerId, report: EvaluationDone) -> Loss | None:
        """Take a head's share; gives the sum once every microbatch is in it."""
        if not report.microbatches or report.version != self._job.version:
            return None
        self._reports[worker, report.microbatches[0]] = report
        reports = [self._reports[key] for key in sorted(self._reports)]
        if len({m for r in reports for m in r.microbatches}) < self.num_microbatches:
            return None
        return Loss(
            loss_sum=exact_sum(r.loss_sum for r in reports), num_tokens=sum(r.num_tokens for r in reports)
        )

    def _available(self) -> int:
        spec = self._job.spec
        num_samples = min(spec.evaluation.samples, self.num_validation_samples)
        return num_samples // spec.batch.microbatch_samples
