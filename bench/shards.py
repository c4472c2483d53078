"""Steps with shards of the vocabulary beside what was planned: real workers, emulated times of ops and links.

    python -m bench.shards [--steps 4] [--op 0.1] [--only hops|sites] [--json]

`hops`: four workers nothing or 50 ms from each other; `--op` seconds a forward between the ends, about that at a shard.

`sites`: a `llama-1b` with tied ends, in a line, its two ends in shards, on eight workers of 10 TFLOP/s in two sites
that 1 Gbit/s and 20 ms join. Widths and rows are a 64th, tokens an eighth, so that FLOPs of all layers, and bytes
between stages, are in the proportions of the real one; seconds of ops and links are the real ones' eight times over,
for real ops have to be done within them. Ends with one JSON line; exit code 1 if a goal is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.emulated.cluster import EmulatedCluster, free_addresses
from bench.emulated.fleet import Links, op_times
from bench.emulated.job import HIDDEN, make_job, write_tokens
from bench.plan import NUM_WARM_STEPS, Outcome, train
from bench.report import Row, finish
from client.api import Client
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.reduced import reduced_by_group
from skein.model.rows import RowCut, VocabularySpec, VocabularySplit
from skein.plan.cut import cut_job
from skein.plan.load import stage_loads
from skein.types import StageIndex, Tied

NUM_WORKERS, NUM_MICROBATCHES = 4, 8
HOPS_S = (0.0, 0.05)
LEAST, MOST = 0.85, 1.15
"""Measured over predicted, of hops."""
SITES = ("here",) * 4 + ("there",) * 4
SLOWER, SMALLER = 8.0, 512
"""Seconds over the real ones, and real bytes over those of a boundary tensor."""
REAL_FLOPS_PER_S, REAL_FORWARD_FLOPS = 1e13, 2.62e12
"""Of a worker, and of a sample of 1,024 tokens through `llama-1b`."""
LEAST_OF_SITES, MOST_OF_SITES = 0.9, 1.1
SPLITS = (VocabularySplit.OUTPUT, VocabularySplit.BOTH)


def job_of(
    name: str, tokens: Path, shape: LlamaShape, split: VocabularySplit, *, stages: int, steps: int
) -> JobSpec:
    """Job of a line of stages and shards, with no other plan than the first."""
    drawn = make_job(
        name,
        tokens,
        method="search",
        num_workers=stages,
        stages=stages,
        microbatches=NUM_MICROBATCHES,
        skip_ratio=0.0,
        budget_s=5.0,
        steps=steps,
    )
    vocabulary = VocabularySpec(split=split, rows=RowCut.EVEN)
    changes = {
        "model": LlamaModel(shape=shape),
        "parallel": ParallelSpec(stages=stages, vocabulary=vocabulary),
        "skip": SkipSpec(),
        "plan": PlanSpec(budget_s=5.0, replan_if_off_by=1_000_000),
    }
    return JobSpec.model_validate(drawn.model_dump() | {k: v.model_dump() for k, v in changes.items()})


def hop_shape() -> LlamaShape:
    """A block for each stage, and rows that are as much work at each shard as that block."""
    return LlamaShape(
        vocab_size=1536,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_WORKERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )


def site_job(tokens: Path, split: VocabularySplit, *, steps: int) -> JobSpec:
    """The small `llama-1b`: 16 microbatches of 8 samples of 16 tokens."""
    shape = LlamaShape(
        vocab_size=2004,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    drawn = job_of(f"sites-{split}", tokens, shape, split, stages=len(SITES), steps=steps)
    data = drawn.data.model_copy(update={"sequence_tokens": 16})
    changes: dict[str, DataSpec | BatchSpec] = {
        "data": data,
        "batch": BatchSpec(samples=128, microbatch_samples=8),
    }
    return JobSpec.model_validate(drawn.model_dump() | {k: v.model_dump() for k, v in changes.items()})


def over_hops(folder: Path, hop_s: float, *, op_s: float, steps: int) -> Iterator[Row]:
    """Both splits on workers that are so many seconds from each other."""
    folder.mkdir()
    tokens = write_tokens(folder / "tokens")
    jobs = [
        job_of(f"{split}", tokens, hop_shape(), split, stages=NUM_WORKERS, steps=steps + NUM_WARM_STEPS)
        for split in SPLITS
    ]
    first = jobs[0].parallel.runs[1].start
    middle = stage_loads(jobs[0], cut_job(jobs[0]))[first + 1]
    speed = middle.flops / (3 * op_s)
    links = Links(
        addresses=free_addresses(NUM_WORKERS),
        latency_s=tuple(tuple(hop_s * (a != b) for b in range(NUM_WORKERS)) for a in range(NUM_WORKERS)),
        bytes_per_s=((1e9,) * NUM_WORKERS,) * NUM_WORKERS,
    )
    for job in jobs:
        what = f"vocabulary {job.name} in shards, {hop_s:g} s from worker to worker"
        yield _row(what, _trained(folder / job.name, links, job, speed, ())[0], LEAST, MOST)


def over_sites(folder: Path, *, steps: int) -> Iterator[Row]:
    """The step of two sites, and what of the tied matrix goes from one to the other."""
    folder.mkdir()
    job = site_job(write_tokens(folder / "tokens"), VocabularySplit.BOTH, steps=steps + NUM_WARM_STEPS)
    forward = sum(load.forward_flops for load in stage_loads(job, cut_job(job)))
    speed = forward / REAL_FORWARD_FLOPS * REAL_FLOPS_PER_S / SLOWER
    outcome, tied_bytes = _trained(folder / "sites", site_links(), job, speed, SITES)
    what = "llama-1b in small, tied, both ends in shards, two sites joined by 1 Gbit/s and 20 ms"
    yield _row(what, outcome, LEAST_OF_SITES, MOST_OF_SITES)
    yield Row(
        what=f"bytes of the tied matrix between sites in a step, {what}",
        value=tied_bytes,
        unit="B",
        against="whole ends: all of it, each way",
        ratio=tied_bytes,
        goal="0",
        holds=tied_bytes == 0,
        spread=0.0,
    )


def site_links() -> Links:
    """10 Gbit/s and 0.1 ms within a site, 1 Gbit/s and 20 ms between two, all of it slower and smaller."""
    num_workers = len(SITES)

    def rows(within: float, between: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(within if a == b else between for b in SITES) for a in SITES)

    bits = 8 * SMALLER * SLOWER
    return Links(
        addresses=free_addresses(num_workers),
        latency_s=rows(SLOWER * 1e-4, SLOWER * 0.02),
        bytes_per_s=rows(1e10 / bits, 1e9 / bits),
    )


def _trained(
    folder: Path, links: Links, job: JobSpec, speed: float, sites: Sequence[str]
) -> tuple[Outcome, int]:
    """A job through new workers, and bytes of tied rows that its plan sums up between sites."""
    folder.mkdir()
    with EmulatedCluster(folder, links) as cluster:
        times = [op_times(job, speed)] * len(links.addresses)
        cluster.start_fleet(times, flops_per_s=speed, memory_bytes=1 << 30, sites=sites)
        with cluster.client() as client:
            outcome = train(client, job)
            site_by_worker = dict(zip(cluster.names, sites, strict=False))
            return outcome, _tied_bytes(client, job, site_by_worker)


def _tied_bytes(client: Client, job: JobSpec, site_by_worker: dict[str, str]) -> int:
    (listed,) = client.jobs()
    sites: dict[StageIndex, set[str]] = {}
    for x in client.job(listed.job).status().chunk_times:
        chunk = x.planned.chunk
        sites.setdefault(chunk.stage, set()).add(site_by_worker.get(chunk.worker, ""))
    reduced = reduced_by_group(job.model, cut_job(job))
    return sum(
        x.num_parameters * job.word_bytes
        for group, x in reduced.items()
        if isinstance(group, Tied) and len(set().union(*(sites[stage] for stage in x.stages))) > 1
    )


def _row(what: str, outcome: Outcome, least: float, most: float) -> Row:
    ratio = outcome.step_s / outcome.predicted_s
    return Row(
        what=f"{what}: measured step",
        value=outcome.step_s,
        unit="s",
        against=f"{outcome.predicted_s:.3f} s predicted; processors {outcome.busy:.0%} busy",
        ratio=ratio,
        goal=f"{least} to {most}",
        holds=least <= ratio <= most,
        spread=0.0,
    )


def main() -> int:
    """Train on emulated fleets with the vocabulary in shards."""
    parser = argparse.ArgumentParser(prog="skein bench shards", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=4, help="counted, in each job")
    parser.add_argument("--op", type=float, default=0.1, help="seconds of a forward, of hops")
    parser.add_argument("--only", choices=("hops", "sites"))
    parser.add_argument("--json", action="store_true", help="print nothing but the line of JSON")
    args = parser.parse_args()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in _rows(Path(folder), args.only, op_s=args.op, steps=args.steps):
            found.append(row)
            if not args.json:
                print(f"{row.what}: {row.value:.3f} {row.unit}, {row.against}", flush=True)
    return finish("shards", found)


def _rows(folder: Path, only: str | None, *, op_s: float, steps: int) -> Iterator[Row]:
    if only != "sites":
        for number, hop_s in enumerate(HOPS_S):
            yield from over_hops(folder / str(number), hop_s, op_s=op_s, steps=steps)
    if only != "hops":
        yield from over_sites(folder / "far", steps=steps)


if __name__ == "__main__":
    sys.exit(main())
