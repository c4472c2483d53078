"""Loss on validation data: when it is due, and the mean of what the heads report."""

from skein.numeric.sums import exact_sum
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.records import Evaluated
from skein.protocol.messages.array_rounds import added_scores
from skein.protocol.messages.directives import Evaluate
from skein.protocol.messages.reports import EvaluationDone
from skein.types import WorkerId


class Evaluation(RunPart):
    """The evaluation of one version at a time."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.num_validation_samples = 0
        self._num_microbatches = 0
        self._reports: dict[tuple[WorkerId, int], EvaluationDone] = {}

    def found(self, num_validation_samples: int) -> None:
        """Every origin has so many samples; says if they are too few to evaluate anything."""
        is_news = num_validation_samples != self.num_validation_samples or self._job.version == 0
        self.num_validation_samples = num_validation_samples
        if is_news and not self._available():
            wanted = 1 if self._takes_all else self._job.spec.batch.microbatch_samples
            self._log(
                f"is not evaluated: {num_validation_samples} validation samples are fewer than "
                f"one microbatch of {wanted}; raise data.validation_ratio or evaluation.samples"
            )

    def is_due(self, *, is_last: bool = False) -> bool:
        """Whether the job's version is to be evaluated and was not; `is_last`: none comes after it, for some reason."""
        spec, version, last = self._job.spec, self._job.version, self._job.last_evaluation
        if (last is not None and last.version == version) or not self._available():
            return False
        every = spec.evaluation.every_steps
        return is_last or version >= self._job.total_steps or (bool(every) and version % every == 0)

    def begin(self) -> None:
        """Have the job's version evaluated."""
        self._reports.clear()
        self._num_microbatches = self._available()
        self._members.send_placed(
            Evaluate(version=self._job.version, num_microbatches=self._num_microbatches)
        )

    def is_complete(self, worker: WorkerId, report: EvaluationDone, *, now: float) -> bool:
        """Take a head's share; once every microbatch is in it, the mean is recorded."""
        job, version = self._job.job, self._job.version
        if not report.microbatches or report.version != version:
            return False
        self._reports[worker, report.microbatches[0]] = report
        reports = [self._reports[key] for key in sorted(self._reports)]
        if len({m for r in reports for m in r.microbatches}) < self._num_microbatches:
            return False
        num_tokens = sum(r.num_tokens for r in reports)
        loss = exact_sum(r.loss_sum for r in reports) / max(1, num_tokens)
        rows = added_scores(r.rows for r in reports)
        self._out.record(
            Evaluated(job=job, version=version, loss=loss, num_tokens=num_tokens, wall_s=now, rows=rows)
        )
        self._log(f"step={version} validation_loss={loss:.4f}")
        return True

    def _available(self) -> int:
        spec = self._job.spec
        num_samples = min(spec.evaluation.samples, self.num_validation_samples)
        size = spec.batch.microbatch_samples
        return -(-num_samples // size) if self._takes_all else num_samples // size

    @property
    def _takes_all(self) -> bool:
        """Whether all samples count, the last microbatch being short, and not whole microbatches alone.

        Trials of a sweep are compared, in arrays, whose microbatches are whole batches of theirs, and alone.
        """
        return self._job.sweep is not None
