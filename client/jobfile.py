"""A job file made ready to be sent: paths absolute, sizes read from where the job begins, and checked.

What can be known without any worker is refused here; whether data can be read only workers know.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from client.documents import end_of_documents
from client.given import STANDARD_INPUT, read_text
from skein.config.data.sources import DigitsSource, SourceSpec
from skein.config.data.spec import BYTES, DataSpec
from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.config.location import cure_of_path, parse_location, parse_offered
from skein.errors import UserError
from skein.model.decoder import DecoderModel
from skein.plan.admission import check_admissible, settled_job
from skein.storage.places import FIELD

_BYTE_VALUES = 256


def read_job(path: Path, *, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in the file at `path`, ready to be sent. Relative paths in it count from its folder.

    `-` is standard input; relative paths in that count from the working directory.

    Raises:
        UserError: the file cannot be read, or something is wrong with what it says.
    """
    text = read_text("job file", path, hint="give a job file, such as deploy/config/examples/first-job.yaml")
    base = Path() if path in STANDARD_INPUT else path.parent
    return read_job_text(text, origin=str(path), base=base, overrides=overrides)


def read_job_text(text: str, *, origin: str, base: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in `text` (YAML), ready to be sent.

    Args:
        text: see `skein.config.load.parse_job`.
        origin: where the text is from, for people.
        base: the folder that relative paths count from.
        overrides: `path=value`, each.

    Raises:
        UserError: something is wrong with it.
    """
    return prepare_job(parse_job(text, origin=origin, overrides=overrides), base=base)


def prepare_job(job: JobSpec, *, base: Path) -> JobSpec:
    """`job` with absolute paths and with the sizes of what it begins from, as the coordinator will admit it.

    Raises:
        UserError: what no fleet could run, or what would not train.
    """
    model = _begun(job.model, base) if isinstance(job.model, DecoderModel) else job.model
    url = job.checkpoint.url
    changes = {
        "model": model,
        "data": _located(job.data, base),
        "checkpoint": job.checkpoint.model_copy(update={"url": url and _located_url(url, base)}),
    }
    prepared = settled_job(job.model_copy(update=changes))
    # Sizes may have come from where it begins.
    prepared.check_sizes()
    check_admissible(prepared)
    _check_fit(prepared)
    return prepared


def _begun(model: DecoderModel, base: Path) -> DecoderModel:
    """`model` with its `init_from` absolute, and from there its sizes, unless the job says them, and further fields.

    What workers offer by name is not looked into: a job that begins from that says its sizes itself.
    """
    if model.init_from is None:
        return model
    if parse_offered(model.init_from, field="model.init_from") is not None:
        if model.preset is None and model.shape is None:
            hint = "only workers can look into it: say the sizes, too, by model.preset or model.shape"
            raise UserError("model.init_from", model.init_from, hint)
        return model
    directory = _absolute(model.init_from, base)
    return model.model_copy(update={"init_from": str(directory)}).begun(_config(directory))


def _config(directory: Path) -> dict[str, object]:
    path = directory / "config.json"
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"config.json: {error.strerror}; give a Hugging Face directory that this machine can read too"
        raise UserError("model.init_from", str(directory), hint) from error
    except ValueError as error:
        raise UserError("model.init_from", str(directory), f"config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(
            "model.init_from", str(directory), "config.json is not an object: give another directory"
        )
    return config


def _located(data: DataSpec, base: Path) -> DataSpec:
    located = [_located_source(source, base, field) for field, source in data.named_sources]
    tokenizer = data.tokenizer
    if tokenizer != BYTES:
        tokenizer = _located_path(tokenizer, base, "data.tokenizer")
    num_training = len(data.sources)
    changes = {"sources": tuple(located[:num_training]), "validation": tuple(located[num_training:])}
    return data.model_copy(update={**changes, "tokenizer": tokenizer})


def _located_source(source: SourceSpec, base: Path, field: str) -> SourceSpec:
    if not isinstance(source, DigitsSource):
        return source.model_copy(update={"path": _located_path(source.path, base, f"{field}.path")})
    return source


def _located_path(path: str, base: Path, where: str) -> str:
    """An absolute path; what workers offer by name stays as it is."""
    if parse_offered(path, field=where) is not None:
        return path
    if "://" in path or cure_of_path(path) is not None:
        hint = "workers read files: give a path, or data://NAME, and mount there or copy to it what lies elsewhere"
        raise UserError(where, path, hint)
    return str(_absolute(path, base))


def _absolute(path: str, base: Path) -> Path:
    return Path(os.path.abspath(base / Path(path).expanduser()))


def _located_url(url: str, base: Path) -> str:
    """A plain path becomes absolute; `s3://...` and its like are checked, and stay."""
    if "://" not in url and "::" not in url and cure_of_path(url) is None:
        return str(_absolute(url, base))
    parse_location(url, field=FIELD)
    return url


def _check_fit(job: JobSpec) -> None:
    """Refuses data that the model cannot take, where the job file alone tells."""
    size = job.model.vocab_size
    for named, source in job.data.named_sources:
        field = f"{named}.format"
        if source.is_labelled and size is not None:
            hint = (
                "samples with labels are nothing for a language model: "
                "give text, jsonl or tokens, or family: digits_cnn or mlp"
            )
            raise UserError(field, source.format, hint)
        if not source.is_labelled and size is None:
            takes = f"{job.model.family} takes samples with labels"
            raise UserError(
                field, source.format, f"{takes}: give arrays, digits or jsonl with `label`, or family: llama"
            )
    is_bytes = job.data.has_text and job.data.tokenizer == BYTES
    if is_bytes and size is not None and size < _BYTE_VALUES:
        hint = f"bytes have {_BYTE_VALUES} values, the model's vocab_size is {size}: set it to {_BYTE_VALUES}"
        raise UserError("data.tokenizer", BYTES, hint)
    end_of_documents(job.data)
