"""The model card of an export: what it was made of and how, with the hashes by which both are told from others."""

from dataclasses import dataclass
from pathlib import Path

import skein
from skein.config.data.sources import DigitsSource, SourceSpec
from skein.config.job import JobSpec
from skein.model.parameters import num_parameters
from skein.wire.extra import ManifestReply
from skein.wire.views import JobStatus, TrialStatus

_OPEN = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Training of what is exported, up to there: `num_steps` None where nobody knows; losses where they are of that.

    `which`: trial of a sweep, in words; "" of no sweep.
    """

    num_steps: int | None
    total_steps: int
    loss: float | None = None
    evaluation_loss: float | None = None
    which: str = ""


def trained(manifest: ManifestReply, status: JobStatus, trial: TrialStatus | None) -> Trained:
    """Training of a checkpoint of a job, or of a sweep's trial, by what is known of that now."""
    if trial is None:
        num_steps: int | None = manifest.version
        newest: int = status.step
        loss, evaluation_loss, total_steps = status.loss, status.evaluation_loss, status.total_steps
    else:
        saved, newest = trial.saved, trial.num_steps
        is_saved = saved is not None and (saved.array, saved.version) == (manifest.job, manifest.version)
        num_steps = saved.num_steps if saved is not None and is_saved else None
        loss, evaluation_loss, total_steps = trial.loss, trial.evaluation_loss, trial.num_steps_wanted
    is_newest = num_steps == newest
    return Trained(
        num_steps=num_steps,
        total_steps=total_steps,
        loss=loss if is_newest else None,
        evaluation_loss=evaluation_loss if is_newest else None,
        which="" if trial is None else f"trial {trial.trial} of {status.job}",
    )


def model_card(
    manifest: ManifestReply, job: JobSpec, course: Trained, *, dtype: str, has_tokenizer: bool
) -> str:
    """README.md of an export, with the header that Hugging Face reads.

    Args:
        manifest: of the checkpoint that is exported.
        job: what it says was trained.
        course: how it was trained up to there.
        dtype: of the exported weights, in torch's words.
        has_tokenizer: whether the tokenizer's files lie beside.
    """
    is_text = job.model.vocab_size is not None
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"} if is_text else {}
    header = [f"{key}: {value}" for key, value in {**head, "tags": "[skein]"}.items()]
    rows = [f"| {name} | {value} |" for name, value in _facts(manifest, job, course, dtype).items()]
    opening = _OPEN if is_text else ""
    if is_text and not has_tokenizer:
        opening += "\nThe tokenizer is not in this folder: copy its files here first.\n"
    parts = ["---", *header, "---", "", f"# {job.name}", "", _first_line(job, manifest, course), opening]
    return "\n".join([*parts, "| | |", "|---|---|", *rows, ""])


def _first_line(job: JobSpec, manifest: ManifestReply, course: Trained) -> str:
    begun = "" if job.model.begins_from is None else f", begun from {Path(job.model.begins_from).name}"
    steps = f"{course.num_steps} of {course.total_steps} steps"
    if course.num_steps is None:
        steps = f"{manifest.version} rounds of {manifest.job}"
    whose = f", {course.which}" if course.which else ""
    return f"A model of family {job.model.family} after {steps}{begun}{whose}, trained by Skein {skein.__version__}."


def _facts(manifest: ManifestReply, job: JobSpec, course: Trained, dtype: str) -> dict[str, str]:
    unit = "sample" if job.model.vocab_size is None else "token"
    facts = {
        "job": f"{manifest.job}, hash `{job.content_hash()}`",
        "data": "; ".join(map(_source, job.data.sources)),
        "data hash": f"`{manifest.data_fingerprint}`" if manifest.data_fingerprint else "not recorded",
        "tokenizer": Path(job.data.tokenizer).name,
        "parameters": f"{num_parameters(job.model):,}",
        "step": f"{job.batch.samples} samples of {job.data.sequence_tokens} tokens",
        "optimizer": f"{job.optimizer.name}, learning rate {job.optimizer.learning_rate:g}",
        "precision": f"trained in {job.precision}, written as {dtype}",
        "replicas": f"{job.parallel.replicas} by {job.aggregation.rule}{_which(job)}",
    }
    if job.data.validation:
        facts["validated on"] = "; ".join(map(_source, job.data.validation))
    if job.model.vocab_size is None:
        del facts["tokenizer"]
        facts["step"] = f"{job.batch.samples} samples"
    if course.loss is not None:
        facts["loss"] = f"{course.loss:.4g} nats per {unit}"
    if course.evaluation_loss is not None:
        facts["validation loss"] = f"{course.evaluation_loss:.4g} nats per {unit}"
    return facts


def _which(job: JobSpec) -> str:
    whose = job.aggregation.export_of
    return f"; these are {whose}" if whose else ""


def _source(source: SourceSpec) -> str:
    """Its kind and its own name: the folders above it are nobody else's business."""
    weight = "" if source.weight == 1.0 else f" by weight {source.weight:g}"
    name = "" if isinstance(source, DigitsSource) else f" {Path(source.path).name}"
    return f"{source.format}{name}{weight}"
