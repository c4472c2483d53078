"""Every aggregation rule, in real processes: it learns, it is counted in bytes, and a death costs it no step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster import Cluster, running
from client.api import Job
from skein.config.aggregation import (
    AggregationSpec,
    AllReduce,
    DiLoCo,
    Gossip,
    Lsgd,
    OneBitAdam,
    OneBitLamb,
)
from skein.config.job import JobSpec, LlamaModel
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.plan.rounds import is_exchange
from skein.types import JobState
from skein.wire.views import StepFinished
from tests.e2e.jobs import text_job, write_text

NUM_STEPS = 24

RULES: dict[str, tuple[AggregationSpec, OptimizerSpec]] = {
    "int8": (AllReduce(wire="int8"), AdamWSpec(learning_rate=3e-3, warmup_steps=4)),
    "one-bit-adam": (
        OneBitAdam(rule="one_bit_adam", warmup_steps=10),
        AdamWSpec(learning_rate=3e-3, warmup_steps=4),
    ),
    "one-bit-lamb": (
        OneBitLamb(rule="one_bit_lamb", warmup_steps=12),
        LambSpec(name="lamb", learning_rate=1e-2, warmup_steps=4),
    ),
    "diloco": (
        DiLoCo(rule="diloco", local_steps=6, fragments=2, wire="int4"),
        AdamWSpec(learning_rate=3e-3, warmup_steps=4),
    ),
    "decentlam": (
        Gossip(rule="gossip", method="decentlam", graph="ring"),
        SgdSpec(name="sgd", learning_rate=3e-2, momentum=0.8, warmup_steps=4),
    ),
    "measured": (
        Gossip(rule="gossip", method="decentlam", graph="measured"),
        AdamWSpec(learning_rate=3e-3, warmup_steps=4),
    ),
    "lsgd": (
        Lsgd(rule="lsgd", local_every_steps=3, global_every_steps=6, probe_samples=4),
        AdamWSpec(learning_rate=3e-3, warmup_steps=4),
    ),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("aggregation"), 4) as cluster:
        yield cluster


def job_of(name: str, text: Path, *, stages: int = 1, replicas: int = 4) -> JobSpec:
    rule, optimizer = RULES[name]
    job = text_job(name, text, steps=NUM_STEPS, stages=stages, replicas=replicas)
    assert isinstance(job.model, LlamaModel)
    assert job.model.shape is not None
    untied = job.model.model_copy(
        update={"shape": job.model.shape.model_copy(update={"tie_word_embeddings": False})}
    )
    changed = {"aggregation": rule, "optimizer": optimizer, "model": untied}
    return JobSpec.model_validate(job.model_copy(update=changed).model_dump())


def steps_of(job: Job) -> list[tuple[int, float]]:
    return [
        (e.body.record.step, e.body.record.loss) for e in job.history() if isinstance(e.body, StepFinished)
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_learns_and_every_step_is_made_once(cluster: Cluster, text: Path, name: str) -> None:
    with cluster.client() as client:
        job = client.submit(job_of(name, text))
        status = job.wait()
        steps = steps_of(job)
    assert status.state is JobState.FINISHED, status.reason
    assert status.generation == 1 or "disagree" not in status.reason
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    # 5.6 nats is a draw among 256 bytes; all of these rules are well on their way after so few steps.
    assert steps[-1][1] < steps[0][1] - 0.5


@pytest.mark.parametrize("name", ["one-bit-adam", "diloco", "decentlam", "lsgd"])
def test_a_killed_member_costs_no_step(cluster: Cluster, text: Path, name: str) -> None:
    with cluster.client() as client:
        job = client.submit(job_of(name, text).model_copy(update={"name": f"{name}-dies"}))
        for event in job.events():
            if isinstance(event.body, StepFinished) and event.body.record.step >= NUM_STEPS // 2:
                break
        cluster.kill_worker("w3")
        status = job.wait()
        steps = steps_of(job)
    cluster.start_workers(["w3"])
    cluster.wait_for_workers(4)
    assert status.state is JobState.FINISHED, status.reason
    assert status.generation >= 2
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    assert steps[-1][1] < steps[0][1] - 0.5


def test_walkers_of_two_stages_keep_to_their_own_chunks(cluster: Cluster, text: Path) -> None:
    with cluster.client() as client:
        job = client.submit(job_of("diloco", text, stages=2, replicas=2))
        status = job.wait()
        steps = steps_of(job)
    assert status.state is JobState.FINISHED, status.reason
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    assert steps[-1][1] < steps[0][1] - 0.5


def test_fragments_are_exchanged_while_steps_go_on(cluster: Cluster, text: Path) -> None:
    overlapped = job_of("diloco", text).model_copy(
        update={
            "name": "overlapped",
            "aggregation": DiLoCo(rule="diloco", local_steps=6, fragments=2, overlap_steps=2, wire="int4"),
        }
    )
    with cluster.client() as client:
        job = client.submit(overlapped)
        status = job.wait()
        records = [e.body.record for e in job.history() if isinstance(e.body, StepFinished)]
    assert status.state is JobState.FINISHED, status.reason
    assert [record.step for record in records] == list(range(NUM_STEPS))
    ended = [record.step for record in records if any(is_exchange(x.group) for x in record.results)]
    # Due at the end of every third step, each ends two steps later; the last ends with the job.
    assert ended == [4, 7, 10, 13, 16, 19, 22, 23]
    assert records[-1].loss < records[0].loss - 0.5
