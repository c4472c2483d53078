"""Checks for reports that no worker of this job can have made, though each of their numbers alone could be."""

from skein.config.job import ArrayJob, JobSpec
from skein.numeric.sketch import SKETCH_LENGTH
from skein.protocol.messages.reports import (
    ChunksReady,
    EvaluationDone,
    LinksMeasured,
    Report,
    SketchTaken,
    StageDone,
)
from skein.types import WorkerId

MOST_FINGERPRINT = 128
"""Characters of a fingerprint of data, which the run log keeps; a SHA-256 has 64."""


def implausible(worker: WorkerId, report: Report, spec: JobSpec | None) -> str | None:
    """Fault in a worker's report, with the value and what would be right; None: it may be true.

    Args:
        spec: the job at hand, if there is one.
    """
    match report:
        case LinksMeasured():
            foreign = [link for link in report.links if worker not in (link.sender, link.receiver)]
            if foreign:
                link = foreign[0]
                return f"LinksMeasured: a link {link.sender} -> {link.receiver} of others: tell of your own"
        case StageDone() if report.ledger.worker != worker:
            return f"StageDone.ledger: {report.ledger.worker}'s: tell of your own"
        case StageDone() if spec is not None:
            told = 0 if report.array is None else len(report.array.rows)
            return (
                _other_rows("StageDone.array", told, spec)
                or _too_many("StageDone.tokens", max(report.tokens, default=0), most_tokens(spec))
                or _odd_rows(report, spec)
            )
        case EvaluationDone() if spec is not None and len(report.rows) != len(spec.rows):
            return _other_rows("EvaluationDone.rows", len(report.rows), spec)
        case EvaluationDone() if spec is not None and report.microbatches:
            most = len(set(report.microbatches)) * most_tokens(spec)
            return _too_many("EvaluationDone.num_tokens", report.num_tokens, most)
        case ChunksReady() if len(report.data_fingerprint) > MOST_FINGERPRINT:
            num_characters = len(report.data_fingerprint)
            return (
                f"ChunksReady.data_fingerprint: {num_characters} characters: give at most {MOST_FINGERPRINT}"
            )
        case SketchTaken() if len(report.values) != SKETCH_LENGTH:
            return f"SketchTaken.values: {len(report.values)} numbers: give {SKETCH_LENGTH}"
        case _:
            pass
    return None


def most_tokens(spec: JobSpec) -> int:
    """Tokens of one microbatch, at most; of an array, of all its rows in all local steps of an op."""
    num_batches = len(spec.rows) * spec.array.op_steps if isinstance(spec, ArrayJob) else 1
    return num_batches * spec.batch.microbatch_samples * spec.data.sequence_tokens


def _other_rows(field: str, num_rows: int, spec: JobSpec) -> str | None:
    wanted = len(spec.rows)
    return None if num_rows == wanted else f"{field}: {num_rows} rows: give {wanted}, which the job has"


def _odd_rows(report: StageDone, spec: JobSpec) -> str | None:
    """Fault in what a round's rows have come to: later arrays go on from there, and sums are recorded."""
    array = report.array
    if array is None or not isinstance(spec, ArrayJob):
        return None
    made = max(row.num_updates for row in array.rows)
    if made > spec.array.last_step:
        return f"StageDone.array: a row of {made} updates: give at most {spec.array.last_step}"
    return _too_many("StageDone.array", array.num_tokens, sum(report.tokens))


def _too_many(field: str, tokens: int, most: int) -> str | None:
    return f"{field}: {tokens}: give at most {most}, which is all of it" if tokens > most else None
