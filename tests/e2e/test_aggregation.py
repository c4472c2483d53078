"""Every aggregation rule, in real processes: it learns, it is counted in bytes, and a death costs it no step."""

import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bench.cluster import Cluster
from client.api import Job
from client.planning.estimates import estimate_of_job
from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.job import CheckpointSpec, JobSpec
from skein.config.optimizer import AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.model.families.llama import LlamaModel
from skein.protocol.log.records import checkpoint_folder, walker_prefix
from skein.types import Exchanged, JobState, Local, Step
from skein.wire.views import CheckpointFinished, StepFinished, WentBack
from tests.e2e.jobs import NUM_STEPS, text_job, wait_for_step
from tests.support.extent import ENTIRE

NUM_WORKERS = 4
PATIENCE_S, POLL_S = 300.0, 0.2

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
        Lsgd(rule="lsgd", local_every_steps=3, global_every_steps=6, probe_samples=4, recheck_ratio=1.0),
        AdamWSpec(learning_rate=3e-3, warmup_steps=4),
    ),
}


TOLD_BY_RULE = {
    "int8": {"skein_compression_ratio", "skein_error_feedback_norm"},
    "one-bit-lamb": {"skein_compression_ratio", "skein_error_feedback_norm"},
    "decentlam": {"skein_consensus_distance"},
    "lsgd": {"skein_consensus_distance", "skein_probe_score_nats", "skein_leader_changes_total"},
}
"""Metrics of the rules that are the first of their kind in `RULES`."""
BRIEF = ("one-bit-lamb", "lsgd")
"""What `make test` tries: all those metrics, told by real workers. What rules do, simulated ones show."""
LEARNING = tuple(
    pytest.param(name, marks=() if name in BRIEF else pytest.mark.long)
    for name in (RULES if ENTIRE else TOLD_BY_RULE | {"diloco": set()})
)


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


def samples(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Sums of samples, by name and rule, of those that have none by name alone."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics").read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, sample.labels.get("rule", "")
            found[key] = found.get(key, 0.0) + sample.value
    return found


def check_metrics(
    cluster: Cluster, job: JobSpec, told: set[str], before: Mapping[tuple[str, str], float]
) -> None:
    """What workers send is what was estimated, and all that they tell of it reaches Prometheus."""
    key = "skein_aggregation_bytes_total", job.aggregation.rule
    expected_bytes = estimate_of_job(job).step_bytes * NUM_STEPS * NUM_WORKERS
    had = before.get(key, 0.0)
    # The last bytes are told with the beats after the job.
    until_s = time.monotonic() + PATIENCE_S
    while (found := samples(cluster)).get(key, 0.0) < had + expected_bytes and time.monotonic() < until_s:
        time.sleep(POLL_S)
    # A tensor is sent again if its receiver was not ready for it, which on a busy machine happens.
    assert expected_bytes <= found[key] - had < 1.1 * expected_bytes
    assert {name for name in told if (name, "") not in found} == set()


def steps_of(job: Job) -> list[tuple[int, float]]:
    return [
        (e.body.record.step, e.body.record.loss) for e in job.history() if isinstance(e.body, StepFinished)
    ]


@pytest.mark.parametrize("name", LEARNING)
def test_a_rule_learns_makes_every_step_once_and_sends_what_was_estimated(
    cluster: Cluster, text: Path, name: str
) -> None:
    spec = job_of(name, text)
    before = samples(cluster)
    with cluster.client() as client:
        job = client.submit(spec)
        status = job.wait()
        steps = steps_of(job)
    assert status.state is JobState.FINISHED, status.reason
    # Every follower computes its leader's score again, and none finds another.
    assert "is not what it claimed" not in cluster.log_of("coordinator")
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    # 5.6 nats is a draw among 256 bytes; all of these rules are well on their way after so few steps.
    assert steps[-1][1] < steps[0][1] - 0.5
    if name in TOLD_BY_RULE:
        check_metrics(cluster, spec, TOLD_BY_RULE[name], before)


@pytest.mark.parametrize("name", [pytest.param("one-bit-adam", marks=pytest.mark.long), "diloco"])
def test_a_killed_member_costs_no_step(cluster: Cluster, text: Path, name: str) -> None:
    with cluster.client() as client:
        job = client.submit(job_of(name, text).model_copy(update={"name": f"{name}-dies"}))
        wait_for_step(job, NUM_STEPS // 2)
        cluster.kill_worker("w3")
        status = job.wait()
        steps = steps_of(job)
    assert status.state is JobState.FINISHED, status.reason
    assert status.generation >= 2
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    assert steps[-1][1] < steps[0][1] - 0.5


@pytest.mark.long
def test_walkers_of_two_stages_keep_to_their_own_chunks(cluster: Cluster, text: Path) -> None:
    with cluster.client() as client:
        job = client.submit(job_of("diloco", text, stages=2, replicas=2))
        status = job.wait()
        steps = steps_of(job)
    assert status.state is JobState.FINISHED, status.reason
    assert [step for step, _ in steps] == list(range(NUM_STEPS))
    assert steps[-1][1] < steps[0][1] - 0.5


@pytest.mark.long
def test_fast_walkers_do_not_wait_for_slow_ones(cluster: Cluster, text: Path) -> None:
    rule = Lsgd(
        rule="lsgd",
        local_every_steps=6,
        global_every_steps=6,
        groups="all",
        probe_samples=4,
        asynchronous=True,
    )
    eager = job_of("lsgd", text).model_copy(update={"name": "eager", "aggregation": rule})
    with cluster.client() as client:
        job = client.submit(eager)
        status = job.wait()
        records = [e.body.record for e in job.history() if isinstance(e.body, StepFinished)]
    assert status.state is JobState.FINISHED, status.reason
    assert [record.step for record in records] == list(range(NUM_STEPS))
    num_walkers = [sum(isinstance(x.group, Local) for x in record.results) for record in records]
    assert min(num_walkers) < 4, "processes on two cores do not all end a step together, so somebody was late"
    assert [n for step, n in enumerate(num_walkers) if step % 6 == 5] == [4] * (NUM_STEPS // 6)
    assert records[-1].loss < records[0].loss - 0.3


@pytest.mark.long
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
    ended = [record.step for record in records if any(isinstance(x.group, Exchanged) for x in record.results)]
    # Due at the end of every third step, each ends two steps later; the last ends with the job.
    assert ended == [4, 7, 10, 13, 16, 19, 22, 23]
    assert records[-1].loss < records[0].loss - 0.5


# --- checkpoints of many walkers ---


def saved_job(name: str, text: Path, url: Path, rule: AggregationSpec) -> JobSpec:
    checkpoint = CheckpointSpec(every_steps=6, keep=2, url=f"file://{url}")
    changed = {"name": f"{name}-saved", "aggregation": rule, "checkpoint": checkpoint}
    return job_of(name, text).model_copy(update=changed)


def saved_parts(url: Path, job: Job, what: str) -> list[dict[str, Tensor]]:
    """What the files of this kind have of each walker in the last checkpoint, the main one first."""
    folder = url / job.id / checkpoint_folder(Step(NUM_STEPS))
    files = sorted(folder.glob(f"stage-000.*{what}.safetensors"), key=lambda path: (".w" in path.name, path))
    return [
        {name.removeprefix(walker_prefix(walker)): tensor for name, tensor in load_file(file).items()}
        for walker, file in enumerate(files)
    ]


def exported(folder: Path) -> Mapping[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    return model.state_dict()


def wait_past_a_checkpoint(job: Job) -> None:
    """Until a few steps after one was completed."""
    saved: Step | None = None
    for event in job.events():
        if isinstance(event.body, CheckpointFinished):
            saved = saved or event.body.version
        elif isinstance(event.body, StepFinished) and saved and event.body.record.step >= saved + 4:
            return


@pytest.mark.long
def test_after_the_end_of_all_processes_every_walker_goes_on_from_its_own_state(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    names = list(cluster.workers)
    # All are waited for: which walkers are late depends on the machine.
    rule = DiLoCo(rule="diloco", local_steps=6, fragments=2, wire="fp32", quorum=1.0)
    with cluster.client() as client:
        job = client.submit(saved_job("diloco", text, tmp_path / "ck", rule))
        wait_past_a_checkpoint(job)
    cluster.kill_everything()
    cluster.start_all(names)
    with cluster.client() as client:
        job = client.job(job.id)
        status = job.wait()
        events = job.history()
        client.export(job.id, tmp_path / "out")
    assert status.state is JobState.FINISHED, status.reason
    [back] = [event.body for event in events if isinstance(event.body, WentBack)]
    assert back.to_version in (6, 12, 18)
    made = [event.body.record for event in events if isinstance(event.body, StepFinished)]
    before, after = made[: back.from_version], made[back.from_version :]
    assert [record.step for record in after] == list(range(back.to_version, NUM_STEPS))
    repeated = [record.loss for record in before if record.step >= back.to_version]
    # The same sums of the same numbers: a walker that had begun as another's copy would have other losses.
    assert repeated
    assert repeated == [record.loss for record in after][: len(repeated)]

    agreed, *others = saved_parts(tmp_path / "ck", job, "optimizer")
    own = saved_parts(tmp_path / "ck", job, "model")
    assert (len(others), len(own)) == (3, 4)
    weights = exported(tmp_path / "out")
    for name, tensor in weights.items():
        assert torch.equal(tensor, agreed[f"global_params.{name}"])
    # The last step exchanges all that walkers have learned.
    table = "model.embed_tokens.weight"
    assert all(torch.equal(walker[table], weights[table]) for walker in own)


def test_an_export_of_gossip_is_the_mean_of_its_walkers(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    rule, _ = RULES["decentlam"]
    with cluster.client() as client:
        job = client.submit(saved_job("decentlam", text, tmp_path / "ck", rule))
        status = job.wait()
        client.export(job.id, tmp_path / "out")
    assert status.state is JobState.FINISHED, status.reason
    walkers = saved_parts(tmp_path / "ck", job, "model")
    assert len(walkers) == 4
    for name, tensor in exported(tmp_path / "out").items():
        mean = torch.stack([walker[name].double() for walker in walkers]).mean(0)
        # One rounding to float32; torch sums in another order, which may turn a tie.
        torch.testing.assert_close(tensor.double(), mean, rtol=2**-23, atol=0.0)
    table = "model.embed_tokens.weight"
    assert not torch.equal(walkers[0][table], walkers[1][table])
