"""Whether a sweep may become one: each of its trials is a job that one worker trains alone."""

from collections.abc import Callable, Iterator

from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.config.sweep.trials import named, trials_of
from skein.errors import UserError

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
    for trial in trials_of(job):
        try:
            _check_one_worker(trial.job)
            check(trial.job)
        except UserError as error:
            raise named(error, trial.number, trial.settings) from error


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
        yield UserError("aggregation.rule", job.aggregation.rule, f"{_ONE_WORKER} all_reduce")
    if job.budget.hours is not None:
        hint = "trials are compared after equal steps: leave it away, and give steps, tokens or epochs"
        yield UserError("budget.hours", job.budget.hours, hint)
    least, most = job.resources.min_workers, job.resources.max_workers
    if least is not None and least > 1:
        yield UserError("resources.min_workers", least, f"{_ONE_WORKER} 1, or null")
    if most is not None:
        hint = "this bounds the workers of one trial, which has one: leave it away"
        yield UserError("resources.max_workers", most, hint)
