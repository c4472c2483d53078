"""Whether a sweep may become one: each of its trials is a job that one worker trains alone."""

from collections.abc import Callable, Iterator, Sequence

from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.config.sweep.spec import SweepSpec
from skein.config.sweep.trials import SweepTrial, named, trials_of
from skein.errors import UserError
from skein.plan.sweeping.packing import alike, parting, why_alone

_ONE_WORKER = "a trial trains on one worker, and the others have other trials: give"


def check_sweep(job: JobSpec, check: Callable[[JobSpec], None]) -> None:
    """Refuses a job with a sweep one of whose trials could not be submitted alone, or asks for several workers.

    Args:
        job: any; without a sweep there is nothing to refuse.
        check: refuses a job that could not be submitted.

    Raises:
        UserError: the first thing that is wrong; of a trial, with its number and settings.
    """
    if job.sweep is None:
        return
    _check_one_worker(job)
    _check_search(job, job.sweep)
    for trial in trials_of(job):
        try:
            _check_one_worker(trial.job)
            _check_is_measured(trial.job, job.sweep)
            check(trial.job)
        except UserError as error:
            raise named(error, trial.number, trial.settings) from error
    if job.sweep.fuse == "always":
        _check_fused(trials_of(job))


def _check_is_measured(trial: JobSpec, sweep: SweepSpec) -> None:
    if sweep.metric == "evaluation_loss" and not (trial.data.validation or trial.data.held_out_ratio):
        hint = "no sample validates, so trials have none: give data.validation_ratio above 0, or loss"
        raise UserError("sweep.metric", sweep.metric, hint)


def _check_search(job: JobSpec, sweep: SweepSpec) -> None:
    if sweep.search != "hyperband":
        return
    for trial in trials_of(job):
        if why := why_alone(trial.job):
            raise UserError("sweep.search", "hyperband", f"survivors go on as rows, and {why}: give random")
    if job.model.is_spread:
        hint = "survivors go on as rows, which are on one device each: give random"
        raise UserError("sweep.search", "hyperband", hint)
    if sweep.least_steps is not None and sweep.least_steps > job.total_steps:
        hint = f"a trial has {job.total_steps} steps: give at most that"
        raise UserError("sweep.least_steps", sweep.least_steps, hint)
    for key in {key for trial in trials_of(job) for key in trial.settings}:
        if key.startswith("budget"):
            hint = f"trials of hyperband are compared after equal steps, so they cannot differ in {key}: give random"
            raise UserError("sweep.search", "hyperband", hint)
    for trial in trials_of(job):
        if (steps := trial.job.total_steps) != job.total_steps:
            hint = (
                f"trials are compared after equal steps, and trial {trial.number} has {steps} where the job has "
                f"{job.total_steps}: give budget.steps, or random"
            )
            raise UserError("sweep.search", "hyperband", hint)


def _check_fused(trials: Sequence[SweepTrial]) -> None:
    """Refuses trials that are not all rows of one array, if only there were room."""
    for trial in trials:
        if why := why_alone(trial.job):
            raise UserError("sweep.fuse", "always", f"{why}: give auto")
    first, *others = (group[0] for group in alike(trials))
    for other in others:
        differs = parting(first).differs_in(parting(other))
        # Another kind of optimizer has other defaults too: what trials set is what is meant.
        keys = ", ".join(
            [key for key in differs if key in first.settings or key in other.settings] or differs
        )
        hint = f"trials {first.number} and {other.number} differ in {keys}, which parts them: give auto"
        raise UserError("sweep.fuse", "always", hint)


def _check_one_worker(job: JobSpec) -> None:
    for error in _mistakes(job):
        raise error


def _mistakes(job: JobSpec) -> Iterator[UserError]:
    parallel = job.parallel
    if parallel.stages > 1:
        yield UserError("parallel.stages", parallel.stages, f"{_ONE_WORKER} 1")
    if parallel.replicas > 1:
        yield UserError("parallel.replicas", parallel.replicas, f"{_ONE_WORKER} 1")
    if parallel.is_cut:
        cut = "chunks, layout and vocabulary.split as they are by default"
        yield UserError("parallel", Words("more than one stage"), f"{_ONE_WORKER} {cut}")
    if not job.aggregation.is_additive:
        hint = f"{_ONE_WORKER} all_reduce, with wire: fp32 and without robust, or leave aggregation away"
        yield UserError("aggregation.rule", job.aggregation.rule, hint)
    if job.budget.hours is not None:
        hint = "trials are compared after equal steps: leave it away, and give steps, tokens or epochs"
        yield UserError("budget.hours", job.budget.hours, hint)
    least, most = job.resources.min_workers, job.resources.max_workers
    if least is not None and least > 1:
        yield UserError("resources.min_workers", least, f"{_ONE_WORKER} 1, or null")
    if most is not None:
        hint = "this bounds the workers of one trial, which has one: leave it away"
        yield UserError("resources.max_workers", most, hint)
