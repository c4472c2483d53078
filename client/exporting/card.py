"""The model card of an export: what it was made of and how, with the hashes by which both are told from others."""

from pathlib import Path

import skein
from skein.config.data.sources import DigitsSource, SourceSpec
from skein.config.job import JobSpec
from skein.model.parameters import num_parameters
from skein.wire.extra import ManifestReply
from skein.wire.views import JobStatus

_OPEN = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```
"""


def model_card(
    manifest: ManifestReply, job: JobSpec, status: JobStatus, *, dtype: str, has_tokenizer: bool
) -> str:
    """README.md of an export, with the header that Hugging Face reads.

    Args:
        manifest: of the checkpoint that is exported.
        job: what it says was trained.
        status: of the job now; its losses count if they are of this very version.
        dtype: of the exported weights, in torch's words.
        has_tokenizer: whether the tokenizer's files lie beside.
    """
    is_text = job.model.vocab_size is not None
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"} if is_text else {}
    header = [f"{key}: {value}" for key, value in {**head, "tags": "[skein]"}.items()]
    rows = [f"| {name} | {value} |" for name, value in _facts(manifest, job, status, dtype).items()]
    opening = _OPEN if is_text else ""
    if is_text and not has_tokenizer:
        opening += "\nThe tokenizer is not in this folder: copy its files here first.\n"
    parts = ["---", *header, "---", "", f"# {job.name}", "", _first_line(job, manifest, status), opening]
    return "\n".join([*parts, "| | |", "|---|---|", *rows, ""])


def _first_line(job: JobSpec, manifest: ManifestReply, status: JobStatus) -> str:
    begun = "" if job.model.begins_from is None else f", begun from {Path(job.model.begins_from).name}"
    steps = f"{manifest.version} of {status.total_steps} steps"
    return f"A {job.model.family} model after {steps}{begun}, trained by Skein {skein.__version__}."


def _facts(manifest: ManifestReply, job: JobSpec, status: JobStatus, dtype: str) -> dict[str, str]:
    is_newest = status.step == manifest.version
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
    if is_newest and status.loss is not None:
        facts["loss"] = f"{status.loss:.4g} nats per token"
    if is_newest and status.evaluation_loss is not None:
        facts["validation loss"] = f"{status.evaluation_loss:.4g} nats per token"
    return facts


def _which(job: JobSpec) -> str:
    whose = job.aggregation.export_of
    return f"; these are {whose}" if whose else ""


def _source(source: SourceSpec) -> str:
    """Its kind and its own name: the folders above it are nobody else's business."""
    weight = "" if source.weight == 1.0 else f" by weight {source.weight:g}"
    name = "" if isinstance(source, DigitsSource) else f" {Path(source.path).name}"
    return f"{source.format}{name}{weight}"
