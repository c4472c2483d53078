"""Replicas as processes on this machine, struck by planned kills and started again; nothing outlives the fleet."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.chaosing.blows import Blow
from bench.studies.chaos_compare.replica_file import Part, replica_of
from bench.studies.chaos_compare.told import Curve, Kind, Told, curve_of, read_told
from client.local import free_port
from skein.config.job import JobSpec
from skein.wire.process.tether import tethered_arguments

_POLL_S = 0.05
_GIVE_UP_S = 300.0
"""Without a new step: what is killed more often than it gets anywhere will not get there."""
_LAST_LINES_S = 20.0
"""At most, after the first replica has made the last step, for the others to tell of theirs and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How one replica is run: by which interpreter, and whether one that ends takes the others with it."""

    python: Path
    module: str
    restarts_together: bool


class Fleet:
    """All replicas of one training.

    Args:
        program: of each replica.
        job: that they train.
        num_replicas: how many.
        folder: for what they are told and tell.
        meeting: host:port where they meet; None: one of their own, another after each restart.
        checkpoint_every_steps: for those that restart together.
    """

    def __init__(
        self,
        program: Program,
        job: JobSpec,
        *,
        num_replicas: int,
        folder: Path,
        meeting: str | None,
        checkpoint_every_steps: int,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._program = program
        self._job = job
        self._num_replicas = num_replicas
        self._folder = folder
        self._fixed_meeting = meeting
        self._meeting = meeting or _new_meeting()
        self._checkpoint_every_steps = checkpoint_every_steps
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._returns: list[tuple[float, int]] = []
        self._told: list[Told] = []
        self._read = [0] * num_replicas

    def __enter__(self) -> Self:
        for replica in range(self._num_replicas):
            self._start(replica)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in list(self._processes):
            self._kill(replica)

    def train(self, blows: Sequence[Blow]) -> Curve:
        """To the last step, or as far as it gets; struck from the first step on.

        Raises:
            AssertionError: no step was made at all; shows what the replicas said last.
        """
        waiting, begun_s, moved_s, num_steps = list(blows), 0.0, time.time(), 0
        while num_steps < self._job.total_steps and time.time() < moved_s + _GIVE_UP_S:
            made = 1 + max((t.step for t in self._news() if t.kind is Kind.APPLIED), default=-1)
            moved_s = time.time() if made > num_steps else moved_s
            num_steps = max(num_steps, made)
            begun_s = begun_s or (time.time() if num_steps else 0.0)
            while begun_s and waiting and time.time() >= begun_s + waiting[0].at_s:
                self._strike(waiting.pop(0))
            self._bring_back()
            time.sleep(_POLL_S)
        assert num_steps, self._last_words()
        until_s = time.time() + _LAST_LINES_S
        while any(process.poll() is None for process in self._processes.values()) and time.time() < until_s:
            time.sleep(_POLL_S)
        _ = self._news()
        return curve_of(self._told)

    def _news(self) -> list[Told]:
        """What was told since the last time."""
        news = list[Told]()
        for replica in range(self._num_replicas):
            lines, self._read[replica] = read_told(self._told_file(replica), begin=self._read[replica])
            news += lines
        self._told += news
        return news

    def _last_words(self) -> str:
        logs = (self._folder / f"{replica}.log" for replica in range(self._num_replicas))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())

    # --- processes ---

    def _strike(self, blow: Blow) -> None:
        replica = next((r for r in map(replica_of, blow.targets) if r in self._processes), None)
        if replica is not None:
            self._kill(replica)
            heappush(self._returns, (time.time() + blow.lasts_s, replica))
            self._lose_others()

    def _lose_others(self) -> None:
        """Where all restart together, those that live end, and begin again at once; the dead one when it is back."""
        if not self._program.restarts_together:
            return
        self._meeting = self._fixed_meeting or _new_meeting()
        for replica in list(self._processes):
            self._kill(replica)
            self._start(replica)

    def _bring_back(self) -> None:
        while self._returns and self._returns[0][0] <= time.time():
            self._start(heappop(self._returns)[1])
        # Some end by themselves when a peer is missing, or when all is done.
        ended = [r for r, process in self._processes.items() if process.poll() not in (None, 0)]
        for replica in ended:
            self._kill(replica)
        if ended:
            self._lose_others()
        for replica in ended:
            self._start(replica)

    def _start(self, replica: int) -> None:
        part = Part(
            job=self._job,
            replica=replica,
            num_replicas=self._num_replicas,
            meeting=self._meeting,
            told=self._told_file(replica),
            checkpoint=self._folder / "checkpoint.safetensors",
            checkpoint_every_steps=self._checkpoint_every_steps,
        )
        path = self._folder / f"{replica}.json"
        path.write_text(part.model_dump_json(), encoding="utf-8")
        python = str(self._program.python)
        command = tethered_arguments(self._program.module, [str(path)], python=python)
        with (self._folder / f"{replica}.log").open("ab") as out:
            self._processes[replica] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )

    def _kill(self, replica: int) -> None:
        process = self._processes.pop(replica)
        process.kill()
        process.wait()

    def _told_file(self, replica: int) -> Path:
        return self._folder / f"{replica}.jsonl"


def environment() -> Mapping[str, str]:
    """One thread each, and this checkout's modules for an interpreter that does not know it."""
    here = str(Path(__file__).parents[3])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": here}


def _new_meeting() -> str:
    return f"127.0.0.1:{free_port()}"
