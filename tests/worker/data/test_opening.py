"""Data are opened once, beside everything else, and a file system that does not answer holds nobody up."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from skein.config.data.sources import TextSource
from skein.config.job import JobSpec
from skein.errors import UnfitError
from skein.protocol.messages.tensors import Phase
from skein.storage.outside import Outside
from skein.types import MicrobatchId, Step
from tests.worker.lab import tiny_job, write_text
from worker.compute.batches import BatchReader
from worker.data import opening
from worker.data.dataset import Batch, Dataset, open_dataset
from worker.data.opening import Datasets

SOON_S = 0.05


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    return tiny_job(write_text(tmp_path))


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What nobody sets as long as the test goes on."""
    event = threading.Event()
    yield event
    event.set()


async def test_data_are_opened_once_for_all_who_ask(job: JobSpec) -> None:
    datasets = Datasets()
    first = await datasets.open(job, is_awaited=False)
    assert await datasets.open(job) is first
    datasets.forget()
    assert await datasets.open(job) is not first


async def test_data_that_cannot_be_opened_are_tried_again(job: JobSpec, tmp_path: Path) -> None:
    datasets, path = Datasets(), tmp_path / "later.txt"
    absent = job.model_copy(
        update={"data": job.data.model_copy(update={"sources": (TextSource(path=str(path)),)})}
    )
    with pytest.raises(UnfitError, match=r"later\.txt"):
        await datasets.open(absent)
    path.write_bytes(b"some text " * 200)
    assert (await datasets.open(absent)).num_train_samples > 0


def rewrite(job: JobSpec, content: bytes) -> bytes:
    """Give the job's one file another content; gives the former one."""
    (source,) = job.data.sources
    assert isinstance(source, TextSource)
    (path,) = (
        sorted(Path(source.path).glob("**/*.txt")) if Path(source.path).is_dir() else [Path(source.path)]
    )
    before = path.read_bytes()
    path.write_bytes(content)
    return before


async def test_a_reader_is_held_to_the_data_that_the_job_was_trained_on(job: JobSpec) -> None:
    datasets = Datasets()
    trained_on = (await datasets.open(job)).fingerprint
    assert (await datasets.open(job, trained_on=trained_on)).fingerprint == trained_on
    datasets.forget()
    before = rewrite(job, b"other text " * 400)
    with pytest.raises(UnfitError, match=r"the job was trained on other data .*skein resume JOB --new-data"):
        await datasets.open(job, trained_on=trained_on)
    # The next try looks at the files of then: put back, or taken by the job.
    assert (await datasets.open(job)).fingerprint != trained_on
    rewrite(job, before)
    assert (await datasets.open(job, trained_on=trained_on)).fingerprint == trained_on


async def test_a_file_that_was_rewritten_under_the_job_is_opened_again_and_refused(job: JobSpec) -> None:
    datasets = Datasets()
    opened = await datasets.open(job)
    text = rewrite(job, b"")
    rewrite(job, bytes(len(text)))
    with pytest.raises(UnfitError, match="restore it"):
        opened.train_batch([0])
    with pytest.raises(UnfitError, match="the job was trained on other data"):
        await datasets.open(job, trained_on=opened.fingerprint)
    rewrite(job, text)
    again = await datasets.open(job, trained_on=opened.fingerprint)
    assert (
        again.train_batch([0]).inputs.tolist() == (await datasets.open(job)).train_batch([0]).inputs.tolist()
    )


async def test_a_file_system_that_does_not_answer_is_told_of(
    job: JobSpec, never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_args: object, **_kwargs: object) -> Dataset:
        never.wait()
        raise AssertionError("nobody waits for this any more")

    monkeypatch.setattr(opening, "open_dataset", hangs)
    with pytest.raises(UnfitError, match=r"data: .*cannot be read on this worker: data gave no sign of life"):
        await Datasets(Outside(silent_s=SOON_S)).open(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanging(Dataset):
    """Gives no batch while `never` is not set."""

    never: threading.Event

    def train_batch(self, positions: object, drawing: object = None) -> Batch:
        """See `Dataset`."""
        self.never.wait()
        raise AssertionError("nobody waits for this any more")


def test_a_batch_that_does_not_come_fails_its_op_and_not_the_worker(
    job: JobSpec, never: threading.Event
) -> None:
    known = open_dataset(job.data, job.model, seed=job.seed)
    dataset = Hanging(
        sources=known.sources, selection=known.selection, fingerprint=known.fingerprint, never=never
    )
    reader = BatchReader(dataset, job, [MicrobatchId(0)], patience_s=SOON_S)
    with pytest.raises(UnfitError, match="gave no samples"):
        reader.batch(Phase.TRAIN, Step(0), MicrobatchId(0))
    reader.close()
