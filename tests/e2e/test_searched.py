"""A coordinator that searches and workers that carry out what it found, beside one torch process on the same paths."""

import time
from contextlib import closing
from pathlib import Path

import pytest

from bench.cluster import START_S, Cluster
from client.cli import run
from coordinator.records.store import Lookout
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.plan import Plan
from skein.protocol.log.records import PlanAdopted
from skein.types import JobId, JobState, Layout, Precision
from skein.wire.views import StepFinished
from tests.e2e.shared import SharedCluster
from tests.e2e.test_parity import NUM_STEPS, TOLERANCES, check, make_job, numbers_of
from tests.support.skipping import run_skipping

POLL_S = 0.2


def searched_job(text: Path) -> JobSpec:
    """Six stages in a loop on three workers; each microbatch visits four of them and may swap two."""
    shape = LlamaShape(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    whole = make_job(
        "searched",
        LlamaModel(shape=shape),
        DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1),
        ParallelSpec(stages=6, replicas=1, layout=Layout.LOOP),
        Precision.FP64,
    )
    return whole.model_copy(
        update={
            "skip": SkipSpec(ratio=1 / 3, max_swaps=1),
            "plan": PlanSpec(budget_s=0.5, replan_if_off_by=1e6),
        }
    )


def wait_for_the_compiler(cluster: Cluster) -> None:
    until_s = time.monotonic() + START_S
    # Of the coordinator that serves now: others have written there before.
    while (
        "the search for plans is compiled" not in cluster.log_of("coordinator").rpartition(" serving on ")[2]
    ):
        assert time.monotonic() < until_s, cluster.log_of("coordinator")
        time.sleep(POLL_S)


def plans_of(job: JobId, directory: Path) -> list[Plan]:
    """What a job has adopted, by the run log, which a standby may read while another has it."""
    with closing(Lookout(directory)) as log:
        records = [record for piece in iter(log.news, []) for record in piece]
    return [x.plan for x in records if isinstance(x, PlanAdopted) and x.job == job]


def test_searched_paths_that_skip_and_swap_train_like_one_torch_process(
    shared: SharedCluster, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = searched_job(text)
    shared.gather(3)
    wait_for_the_compiler(shared)
    with shared.client() as client:
        submitted = client.submit(job)
        steps = [e.body.record for e in submitted.events() if isinstance(e.body, StepFinished)]
        told = submitted.status()
    assert told.state is JobState.FINISHED, told.reason
    assert told.measured_step_s is not None
    assert told.chunk_times
    assert told.transfer_times
    assert [x for x in told.chunk_times if x.measured is None] == []
    assert [x for x in told.transfer_times if x.measured is None] == []
    assert run(["status", submitted.id, "--coordinator", shared.target]) == 0
    [plan] = plans_of(JobId(submitted.id), shared.state)
    shown_rows = capsys.readouterr().out
    assert all(f"stage {x.chunk.stage} on {x.chunk.worker}" in shown_rows for x in plan.chunk_times)
    assert "before the search" in str(plan.reason)
    ways = [[int(hop.stage) for hop in path.hops[:-1]] for path in plan.paths]
    assert {len(way) for way in ways} == {4}
    wanted = run_skipping(job, NUM_STEPS, ways, cut_at=plan.stages)
    check(
        [numbers_of(step) for step in steps],
        wanted,
        TOLERANCES[Precision.FP64],
    )
