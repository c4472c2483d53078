"""The SDK against a scripted coordinator: what is sent, what comes back, and what survives a restart."""

import asyncio
import json
import math
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from client.aio import AsyncClient
from client.api import Client, Job
from client.errors import NotFound, NotReachable, Refused, VersionMismatch
from client.exporting.export import Dtype
from skein.config.load import parse_job
from skein.errors import RemoteError, UserError
from skein.model.parameters import parameter_shapes
from skein.types import JobState
from skein.wire.channel import join_address
from tests.client.conftest import Scripted
from tests.client.scripted import GOOD, Script, event, line_body, serving, status, whole_story
from tests.support.incidents import incident

SMALL = "model={family: llama, shape: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2}}"
PATIENCE_S = 5.0
"""Far above what coming back takes on loopback; reached only when something is wrong."""


def client_of(coordinator: Scripted) -> Client:
    return Client(coordinator.target, patience_s=PATIENCE_S)


def free_address() -> str:
    """Where nothing listens any more."""
    with serving(Script()) as target:
        return target


# --- calls ---


def test_all_jobs_come_in_pages(coordinator: Scripted) -> None:
    coordinator.script.page_jobs = 2
    known = [
        replace(status(f"job-{n}"), state=JobState.RUNNING if n % 3 else JobState.FINISHED) for n in range(7)
    ]
    coordinator.script.jobs = {job.job: job for job in known}
    with client_of(coordinator) as client:
        assert client.jobs() == tuple(known)
        assert [job.job for job in client.jobs(is_going=True)] == ["job-1", "job-2", "job-4", "job-5"]
        page = client.job_page(limit=1, has_ended=True)
        assert ([job.job for job in page.jobs], page.before, page.num_jobs) == (["job-6"], "job-6", 7)


def test_everything_that_can_be_asked_is_answered(coordinator: Scripted) -> None:
    with client_of(coordinator) as client:
        assert client.target == coordinator.target
        assert client.version().release == "9.9"
        assert client.jobs() == (coordinator.script.jobs["first-job-1"],)
        assert client.workers() == tuple(coordinator.script.workers)
        assert [link.receiver for link in client.links()] == ["w2"]
        assert client.drain("w1").state == "draining"
        assert client.job("first-job-1").status().step == 2
        assert client.job("first-job-1").cancel().state is JobState.CANCELLED
        assert client.job("first-job-1").resume(steps=9).state is JobState.PENDING
        assert client.job("first-job-1").pause().state is JobState.HELD


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_incidents_are_all_had_however_many_come_at_once(coordinator: Scripted, number: int) -> None:
    coordinator.script.incidents = [incident("first-job-1", wall_s=float(at)) for at in range(number)]
    with client_of(coordinator) as client:
        assert client.incidents("first-job-1") == tuple(coordinator.script.incidents)
        with pytest.raises(NotFound, match="nobody"):
            client.incidents("nobody")


async def test_asyncio_client_says_the_same(coordinator: Scripted) -> None:
    async with AsyncClient(coordinator.target) as client:
        assert (await client.version()).release == "9.9"
        assert [status.job for status in await client.jobs()] == ["first-job-1"]
        assert [worker.worker for worker in await client.workers()] == ["w1"]
        coordinator.script.incidents = [incident("first-job-1")] * 3
        assert await client.incidents("first-job-1") == (incident("first-job-1"),) * 3
        job = await client.submit(GOOD)
        assert [found.sequence async for found in job.events()] == [1, 2, 3, 3, 4, 5, 6]
        assert (await job.wait()).job == job.id


def test_a_job_may_be_given_as_file_text_or_specification(coordinator: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    spec = parse_job(GOOD, origin="job")
    with client_of(coordinator) as client:
        jobs = [client.submit(path), client.submit(GOOD), client.submit(spec)]
    assert [job.is_new for job in jobs] == [True, True, True]
    assert len({job.id for job in jobs}) == 3
    assert coordinator.script.specs == [spec, spec, spec]


def test_each_submit_is_a_wish_of_its_own_unless_it_names_a_key(coordinator: Scripted) -> None:
    with client_of(coordinator) as client:
        first, second = client.submit(GOOD, key="monday"), client.submit(GOOD, key="monday")
        third = client.submit(GOOD)
    assert first.id == second.id != third.id
    assert (first.is_new, second.is_new, third.is_new) == (True, False, True)


def test_submit_that_breaks_is_made_again_under_the_same_key(coordinator: Scripted) -> None:
    coordinator.script.unavailable = 2
    with client_of(coordinator) as client:
        job = client.submit(GOOD)
    assert len(coordinator.script.keys) == 3
    assert len(set(coordinator.script.keys)) == 1
    assert not job.is_new


# --- errors ---


def test_nobody_there_is_told_at_once() -> None:
    target = free_address()
    with Client(target, patience_s=math.inf) as client, pytest.raises(NotReachable) as caught:
        client.jobs()
    assert caught.value.target == target
    assert str(caught.value) == f"{target}: nothing listens there: start it, or check host and port"


def test_coordinator_that_goes_away_for_good_is_told_when_patience_is_over() -> None:
    with serving(Script()) as target:
        client = Client(target, patience_s=0.0)
        assert client.jobs()
    with client, pytest.raises(NotReachable):
        client.jobs()


def test_another_protocol_is_told_before_anything_is_asked(coordinator: Scripted) -> None:
    coordinator.script.protocol_version = 99
    with client_of(coordinator) as client, pytest.raises(VersionMismatch, match="upgrade this client"):
        client.submit(GOOD)
    assert coordinator.script.keys == []


def test_older_coordinator_is_named_as_the_older(coordinator: Scripted) -> None:
    coordinator.script.protocol_version = 0
    with client_of(coordinator) as client, pytest.raises(VersionMismatch, match="upgrade the coordinator"):
        client.jobs()


def asked(job: Job, verb: str) -> object:
    match verb:
        case "events":
            return list(job.events())
        case "status":
            return job.status()
        case "wait":
            return job.wait()
        case "cancel":
            return job.cancel()
        case _:
            return job.metrics()


@pytest.mark.parametrize("verb", ["status", "events", "wait", "cancel", "metrics"])
def test_unknown_job_is_not_found(coordinator: Scripted, verb: str) -> None:
    with client_of(coordinator) as client, pytest.raises(NotFound) as caught:
        asked(client.job("nobody"), verb)
    assert (caught.value.field, caught.value.value, caught.value.hint) == ("job", "nobody", "no such job")


def test_refusal_keeps_field_value_and_cure(coordinator: Scripted) -> None:
    coordinator.script.error = UserError("checkpoint.url", "s3://x", "no such bucket")
    with client_of(coordinator) as client, pytest.raises(Refused, match="no such bucket") as caught:
        client.submit(GOOD)
    assert not isinstance(caught.value, NotFound)
    assert caught.value.field == "checkpoint.url"


def test_fault_of_the_coordinator_is_a_remote_error(coordinator: Scripted) -> None:
    coordinator.script.error = RemoteError("it is confused")
    with client_of(coordinator) as client, pytest.raises(RemoteError, match="it is confused"):
        client.jobs()


@pytest.mark.parametrize("target", ["", "host", "host:x", "host:99999", ":7411"])
def test_wrong_address_is_the_users_error(target: str) -> None:
    with pytest.raises(UserError, match=r"coordinator: .*: give host:port"):
        Client(target)


def test_wrong_timeout_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"timeout: 0: give a number of seconds above 0"):
        Client(join_address("127.0.0.1", 1), timeout_s=0)


# --- streams ---


@pytest.mark.parametrize("break_after", [[0], [2], [3, 0, 1], [4, 2]])
def test_broken_watch_goes_on_without_loss_or_repetition(
    coordinator: Scripted, break_after: list[int]
) -> None:
    coordinator.script.break_after = list(break_after)
    with client_of(coordinator) as client:
        assert list(client.job("first-job-1").events()) == whole_story()
    assert len(coordinator.script.watched_since) == len(break_after) + 1


def test_events_begin_where_they_are_asked_to(coordinator: Scripted) -> None:
    with client_of(coordinator) as client:
        found = list(client.job("first-job-1").events(since=4))
    assert [event.sequence for event in found] == [5, 6]


def test_leaving_a_watch_leaves_the_client_usable(coordinator: Scripted) -> None:
    coordinator.script.story = whole_story()[:3]
    with client_of(coordinator) as client:
        with closing(client.job("first-job-1").events()) as events:
            assert next(events).sequence == 1
        assert client.jobs()


async def test_cancelling_a_watch_ends_it(coordinator: Scripted) -> None:
    coordinator.script.story = whole_story()[:3]
    async with (
        AsyncClient(coordinator.target) as client,
        aclosing(client.job("first-job-1").events()) as events,
    ):
        for _ in range(3):
            await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        _, pending = await asyncio.wait({waiting}, timeout=0)
        assert pending
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_history_of_a_running_job_is_all_that_happened_so_far(coordinator: Scripted) -> None:
    story = [*whole_story()[:5], event(4, line_body("and after the newest step"), line=2)]
    coordinator.script.story = story
    coordinator.script.break_after = [4]
    with client_of(coordinator) as client:
        assert client.job("first-job-1").history() == tuple(story)


def test_metrics_are_curves(coordinator: Scripted) -> None:
    coordinator.script.jobs["first-job-1"] = status(state=JobState.FINISHED, step=3)
    with client_of(coordinator) as client:
        metrics = client.job("first-job-1").metrics()
    assert [step.record.loss for step in metrics.steps] == [3.0, 2.0, 1.0]
    assert [evaluation.loss for evaluation in metrics.evaluations] == [1.25]


def test_wait_gives_the_status_at_the_end(coordinator: Scripted) -> None:
    with client_of(coordinator) as client:
        assert client.job("first-job-1").wait() == coordinator.script.jobs["first-job-1"]


# --- export ---


def keep_checkpoint(script: Script) -> dict[str, np.ndarray]:
    """A checkpoint of the good job in two files with weights and one without; gives the weights."""
    job = parse_job(GOOD, origin="job", overrides=[SMALL])
    draw = np.random.default_rng(3)
    shapes = parameter_shapes(job.model)
    weights = {name: draw.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    names = list(weights)
    parts = {
        "stage-000.model.safetensors": names[: len(names) // 2],
        "stage-001.model.safetensors": names[len(names) // 2 :],
    }
    files = {part: save({name: weights[name] for name in held}) for part, held in parts.items()}
    files["stage-000.optimizer.safetensors"] = save({"exp_avg.x": np.zeros(3, "<f4")})
    tensors = {part: tuple(held) for part, held in parts.items()}
    script.keep(files, job, tensors=tensors | {"stage-000.optimizer.safetensors": ("exp_avg.x",)})
    return weights


def assert_exported(out: Path, weights: dict[str, np.ndarray]) -> None:
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)


def test_export_is_what_was_saved(coordinator: Scripted, tmp_path: Path) -> None:
    weights = keep_checkpoint(coordinator.script)
    told: list[tuple[int, int]] = []
    with client_of(coordinator) as client:
        done = client.export(
            "first-job-1", tmp_path / "out", on_bytes=lambda num_bytes, total: told.append((num_bytes, total))
        )
    assert (done.job, done.version, done.out) == ("first-job-1", 3, tmp_path / "out")
    assert_exported(done.out, weights)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert len(coordinator.script.offsets) == 2, "the optimizer's state was downloaded"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_has_a_card_with_hashes_and_the_tokenizer(coordinator: Scripted, tmp_path: Path) -> None:
    keep_checkpoint(coordinator.script)
    assert coordinator.script.manifest is not None
    coordinator.script.manifest = replace(coordinator.script.manifest, data_fingerprint="f1" * 32)
    job = parse_job(GOOD, origin="job", overrides=[SMALL])
    with client_of(coordinator) as client:
        done = client.export("first-job-1", tmp_path / "out", dtype=Dtype.BF16)
    assert done.lacking == ()
    assert {path.name for path in done.files} == {path.name for path in done.out.iterdir()}
    card = (done.out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| job | first-job-1, hash `{job.content_hash()}` |" in card
    assert f"| data hash | `{'f1' * 32}` |" in card
    assert "3 of " in card
    assert json.loads((done.out / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(json.loads((done.out / "tokenizer.json").read_text())["model"]["vocab"]) == 256


def test_broken_download_goes_on_where_it_stopped(coordinator: Scripted, tmp_path: Path) -> None:
    weights = keep_checkpoint(coordinator.script)
    coordinator.script.break_after = [2, 0, 5]
    with client_of(coordinator) as client:
        client.export("first-job-1", tmp_path / "out")
    assert_exported(tmp_path / "out", weights)
    assert coordinator.script.offsets == [0, 2000, 2000, 7000, 0]


def test_weights_at_a_url_are_read_from_there(coordinator: Scripted, tmp_path: Path) -> None:
    weights = keep_checkpoint(coordinator.script)
    assert coordinator.script.manifest is not None
    place = tmp_path / "shared" / "first-job-1" / "v00000003"
    place.mkdir(parents=True)
    for name, data in coordinator.script.files.items():
        (place / name).write_bytes(data)
    coordinator.script.manifest = replace(coordinator.script.manifest, url=f"file://{tmp_path}/shared")
    with client_of(coordinator) as client:
        client.export("first-job-1", tmp_path / "out")
        assert_exported(tmp_path / "out", weights)
        (place / "stage-001.model.safetensors").unlink()
        with pytest.raises(UserError, match=r"checkpoint\.url: .*stage-001.*: .*can be read"):
            client.export("first-job-1", tmp_path / "again")
    assert coordinator.script.offsets == []


def test_damaged_file_is_refused_and_nothing_is_left(coordinator: Scripted, tmp_path: Path) -> None:
    keep_checkpoint(coordinator.script)
    name = "stage-001.model.safetensors"
    data = coordinator.script.files[name]
    coordinator.script.files[name] = data[:-1] + bytes([data[-1] ^ 1])
    with client_of(coordinator) as client, pytest.raises(RemoteError, match=rf"{name} is damaged"):
        client.export("first-job-1", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [b"", b"more"])
def test_file_of_another_size_is_refused(coordinator: Scripted, tmp_path: Path, change: bytes) -> None:
    keep_checkpoint(coordinator.script)
    name = "stage-000.model.safetensors"
    coordinator.script.files[name] = coordinator.script.files[name][:-4] + change * 2
    with client_of(coordinator) as client, pytest.raises(RemoteError, match=r"bytes instead of"):
        client.export("first-job-1", tmp_path / "out")


def test_job_without_a_checkpoint_is_not_found(coordinator: Scripted, tmp_path: Path) -> None:
    with client_of(coordinator) as client, pytest.raises(NotFound, match="it has none yet"):
        client.export("first-job-1", tmp_path / "out")


def test_folder_in_use_is_refused_before_anything_is_asked(coordinator: Scripted, tmp_path: Path) -> None:
    with client_of(coordinator) as client, pytest.raises(UserError, match="name a new or empty folder"):
        client.export("first-job-1", tmp_path.parent)
