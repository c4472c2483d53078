"""How long steps take while a worker joins that has to tokenise the job's text first."""

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

from bench.chaosing.job import make_job
from bench.recovering.cluster import POLL_S, RecoveryCluster, commits_of, wait_for_steps
from bench.report import Row
from client.api import Client
from skein.config.data.sources import JsonlSource
from skein.config.data.spec import DataSpec
from skein.config.job import BackupSpec, JobSpec
from skein.model.families.llama import LlamaModel, LlamaShape

NUM_WORKERS = 2
TEXT_BYTES = 200_000_000
STEP_GOAL = 1.5
PATIENCE_S = 900.0
"""For tokenising beside training on few cores."""
_NUM_WORDS = 1000
_NUM_STEPS = 30
"""To compare with, and after the join."""


def write_corpus(folder: Path, *, num_bytes: int = TEXT_BYTES) -> Path:
    """So much text of random words, as lines of JSON."""
    folder.mkdir(parents=True)
    luck = Random(0)
    words = [
        "".join(luck.choices("abcdefghijklmnopqrstuvwxyz", k=luck.randint(2, 9))) for _ in range(_NUM_WORDS)
    ]
    texts = [" ".join(luck.choices(words, k=150)) for _ in range(2_000)]
    page = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    with (folder / "text.jsonl").open("wb") as file:
        for _ in range(-(-num_bytes // sum(map(len, texts)))):
            file.write(page)
    return folder / "text.jsonl"


def keep_tokens_below(folder: Path) -> None:
    """Workers that are started from now on have a cache of their own."""
    os.environ["XDG_CACHE_HOME"] = str(folder)


def join(cluster: RecoveryCluster, client: Client, text: Path, *, cache: Path) -> Row:
    """One of two holders of the only stage dies, and comes back to where nothing is tokenised yet."""
    job = client.submit(_spec(text))
    until_s = time.monotonic() + PATIENCE_S
    while job.status().step < 4:
        assert time.monotonic() < until_s, job.status()
        time.sleep(POLL_S)
    cluster.kill_worker(cluster.names[-1])
    wait_for_steps(job, _NUM_STEPS)
    keep_tokens_below(cache)
    began_s = time.time()
    cluster.start_worker(cluster.names[-1])
    until_s = time.monotonic() + PATIENCE_S
    while not any(w.worker == cluster.names[-1] and w.stages for w in client.workers()):
        assert time.monotonic() < until_s, cluster.log_of(cluster.names[-1])[-2000:]
        time.sleep(POLL_S)
    placed_s = time.time()
    wait_for_steps(job, 3)
    commits = commits_of(job.history())
    job.cancel(discard=True)
    before = [b - a for a, b in pairwise(commits) if b < began_s][-_NUM_STEPS + 4 :]
    during = [b - a for a, b in pairwise(commits) if b > began_s]
    ratio = max(during) / median(before)
    return Row(
        what=f"longest step while a holder of the first stage joins, {text.stat().st_size / 1e6:.0f} MB of text",
        value=max(during),
        unit="s",
        against=f"median before: {median(before):.3f} s, the longest then {max(before) / median(before):.2f} times; "
        f"{len(during)} steps in {placed_s - began_s:.0f} s",
        ratio=ratio,
        goal=f"<= {STEP_GOAL}",
        holds=ratio <= STEP_GOAL,
        spread=0.0,
    )


def _spec(text: Path) -> JobSpec:
    spec = make_job("join-data", num_workers=NUM_WORKERS, steps=100_000, seed=0)
    shape = LlamaShape(hidden_size=128, intermediate_size=352, num_hidden_layers=2)
    source = JsonlSource(format="jsonl", path=str(text))
    data = DataSpec(sources=(source,), sequence_tokens=128)
    changes = {"model": LlamaModel(shape=shape), "data": data, "backup": BackupSpec(every_steps=0)}
    return spec.model_copy(update=changes)
