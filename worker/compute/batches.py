"""Batches for the paths that begin here, read ahead on threads of their own, which never hold up anybody for long."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from skein.config.job import BatchSpec, JobSpec
from skein.data.cursor import positions_of
from skein.errors import UnfitError
from skein.plan.agreeing.election import probe_positions
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.tensors import Phase
from skein.types import MicrobatchId, Step
from worker.data.coreset import Drawing, RowDrawing, row_drawings
from worker.data.dataset import Batch, Dataset

_Key = tuple[Phase, Step, MicrobatchId]

PATIENCE_S = 3.5
"""For one batch. Less than after what an op counts as one that never ends, for then its worker is turned away."""


class BatchReader:
    """Gives batches by (phase, step, microbatch), and reads the next training batch while that one is computed on."""

    def __init__(
        self,
        dataset: Dataset,
        job: JobSpec,
        microbatches: Sequence[MicrobatchId],
        *,
        num_walkers: int = 1,
        choices: Sequence[ToldChoice] = (),
        drawing: Drawing | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`microbatches`: those of a training step that begin here, in the order in which they do.

        `num_walkers`: so many microbatches of a probe, one after another, have the same samples. `choices`: made along
        the run, by which samples are drawn; `drawing` is that of a single one.
        """
        self.dataset = dataset
        self._num_walkers = num_walkers
        self._job = job
        self._microbatches = tuple(microbatches)
        self._patience_s = patience_s
        self._drawing = drawing
        self.row_drawings: dict[int, RowDrawing] = {}
        """Drawings of the rows of an array, of those that have a choice."""
        self._ahead: dict[_Key, Future[Batch]] = {}
        for choice in choices:
            self.draw_by(choice)

    def batch(self, phase: Phase, step: Step, microbatch: MicrobatchId) -> Batch:
        """The samples of one microbatch: of `step`, or of the validation set.

        Raises:
            UnfitError: a file has become unreadable, or its file system does not answer.
        """
        future = self._ahead.pop((phase, step, microbatch), None)
        if future is None:
            future = self._read((phase, step, microbatch))
        if phase.trains:
            self._look_ahead(step, microbatch)
        try:
            return future.result(self._patience_s)
        except FutureTimeoutError as error:
            hint = f"gave no samples for {self._patience_s:g} s: see whether its file system answers"
            raise UnfitError("data", self._job.name, hint) from error

    def probe_microbatches(self) -> tuple[MicrobatchId, ...]:
        """Probe microbatches of the first walker; every walker's have the same samples."""
        num_blocks = -(-self._num_probe_samples // self._job.batch.microbatch_samples)
        return tuple(MicrobatchId(block * self._num_walkers) for block in range(num_blocks))

    @property
    def _num_probe_samples(self) -> int:
        leadership = self._job.aggregation.leadership
        return 0 if leadership is None else leadership.probe_samples

    def _probed(self, step: Step, microbatch: MicrobatchId) -> tuple[int, ...]:
        """Validation positions of a probe's microbatch, drawn anew for each step; the last ones may be fewer."""
        positions = probe_positions(
            self._job.seed,
            step,
            num_samples=self._num_probe_samples,
            num_validation=self.dataset.num_validation_samples,
        )
        size = self._job.batch.microbatch_samples
        first = microbatch // self._num_walkers * size
        return positions[first : first + size] or positions[:1]

    def draw_by(self, choice: ToldChoice) -> None:
        """Draw training samples by this choice from now on; what was read ahead is of an older one.

        Rows of an array read their own, by `row_drawings`.
        """
        if choice.rows:
            self.row_drawings |= row_drawings(choice, self._job.step_batch)
            return
        self._drawing = Drawing.of(choice, self._job.batch)
        self._ahead.clear()

    def close(self) -> None:
        """Read no more."""
        self._ahead.clear()

    def _look_ahead(self, step: Step, microbatch: MicrobatchId) -> None:
        rounds, index = divmod(self._microbatches.index(microbatch) + 1, len(self._microbatches))
        key = (Phase.TRAIN, Step(step + rounds), self._microbatches[index])
        # One batch at most: what a step that was given up had asked for goes.
        self._ahead = {key: self._ahead.get(key) or self._read(key)}

    def _read(self, key: _Key) -> Future[Batch]:
        phase, step, microbatch = key
        if phase.trains:
            positions = positions_of(step, microbatch, self._job.batch)
            return _begun(partial(self.dataset.train_batch, positions, self._drawing))
        if phase.selects:
            rows = block_of(microbatch, self._job.batch, self.dataset.num_train_samples)
            return _begun(partial(self.dataset.row_batch, rows))
        if phase.replicates_samples:
            return _begun(partial(self.dataset.validation_batch, self._probed(step, microbatch)))
        num_samples = self.dataset.num_validation_samples
        positions = evaluation_positions(self._job, microbatch, num_samples=num_samples)
        return _begun(partial(self.dataset.validation_batch, positions))


def _begun(read: Callable[[], Batch]) -> Future[Batch]:
    """A batch that is being read; a thread that never comes back keeps no process from ending."""
    future: Future[Batch] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # noqa: BLE001 - the outermost of this thread: whoever asked gets it
            future.set_exception(error)

    threading.Thread(target=run, name="batch", daemon=True).start()
    return future


def block_of(microbatch: MicrobatchId, batch: BatchSpec, num_rows: int) -> range:
    """Training rows of one microbatch of a selection; the last one may be short.

    >>> block_of(MicrobatchId(1), BatchSpec(samples=8, microbatch_samples=4), 7)
    range(4, 7)
    """
    first = microbatch * batch.microbatch_samples
    return range(first, min(first + batch.microbatch_samples, num_rows))


def evaluation_positions(job: JobSpec, microbatch: MicrobatchId, *, num_samples: int) -> range:
    """Validation positions of one evaluation microbatch, of so many samples; the last one may be short.

    >>> from skein.config.data.sources import DigitsSource
    >>> from skein.config.data.spec import DataSpec
    >>> from skein.config.job import BudgetSpec, EvaluationSpec
    >>> from skein.model.families.digits_cnn import DigitsCnnModel
    >>> job = JobSpec(name="j", model=DigitsCnnModel(family="digits_cnn"), budget=BudgetSpec(steps=1),
    ...               data=DataSpec(sources=(DigitsSource(format="digits"),)), evaluation=EvaluationSpec(samples=6))
    >>> [evaluation_positions(job, MicrobatchId(1), num_samples=many) for many in (9, 5)]
    [range(4, 6), range(4, 5)]
    """
    size = job.batch.microbatch_samples
    first = microbatch * size
    return range(first, max(first + 1, min(first + size, job.evaluation.samples, num_samples)))
