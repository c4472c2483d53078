"""Run logs that an earlier release wrote, kept as files: what a newer one must still read.

`python -m tests.golden.old_logs NAME` writes those of today's release under `logs/NAME`, beside what they came to.
"""

import gzip
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.log.records import Record
from skein.sim.world import World
from tests.golden.stories import drawn, payloads, strike

LOGS = Path(__file__).with_name("logs")
_LENGTH_BYTES = 4


def stories() -> Iterator[tuple[str, World]]:
    """Jobs whose logs hold most kinds of records: lost and new workers, roll-backs, checkpoints, exchanges."""
    yield "loop-tied-skip", drawn("loop 4x2 tied skip 1/2", 110)
    yield "tree", drawn("line 2x3 tied tree", 115)
    yield "slow", drawn("line 2x2 on 3 slow 2", 116)
    yield "robust", strike("robust", 102)
    yield "overlapped", strike("overlapped", 106)
    yield "lsgd-eager", strike("lsgd_eager", 110)


def read(path: Path) -> list[bytes]:
    """The payloads in a file, in order."""
    data, found = gzip.decompress(path.read_bytes()), []
    while data:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES])
        found.append(data[_LENGTH_BYTES:end])
        data = data[end:]
    return found


def came_to(log: Sequence[Record]) -> str:
    """What a coordinator makes of a log, in words and numbers."""
    coordinator = Coordinator()
    coordinator.replay(log)
    history = coordinator.history
    [job] = history.jobs.values()
    assert job.plan is not None
    assert job.last_commit is not None
    commit, plan = job.last_commit, job.plan.plan
    facts = {
        "state": history.state_of(job.job),
        "epoch, generation": (history.epoch, history.generation),
        "version, tokens, late samples": (job.version, job.num_tokens, job.num_late_samples),
        "last commit": (commit.step, commit.decision, commit.samples_after, f"{commit.loss:.6g}"),
        "groups of it": [f"{x.group}: {x.num_tokens}" for x in commit.results],
        "plan": " ".join(f"{x.chunk.worker}/{x.chunk.stage}" for x in plan.chunks),
        "its groups": [f"{x.group}: {len(x.members)}" for x in plan.groups],
        "its paths": [" ".join(str(hop.stage) for hop in path.hops) for path in plan.paths],
        "checkpoints": [x.version for x in job.checkpoints],
        "roll-backs": [(x.from_version, x.to_version, x.reason) for x in job.rollbacks],
        "incidents": [(x.step, x.kind, x.remedy, list(x.workers)) for x in job.incidents],
    }
    return "".join(f"{name}: {value!s}\n" for name, value in facts.items())


def main() -> None:
    """Write the logs of this release."""
    folder = LOGS / sys.argv[1]
    folder.mkdir(parents=True)
    for name, world in stories():
        framed = b"".join(len(x).to_bytes(_LENGTH_BYTES) + x for x in payloads(world.log))
        (folder / f"{name}.gz").write_bytes(gzip.compress(framed, mtime=0))
        (folder / f"{name}.txt").write_text(came_to(world.log))


if __name__ == "__main__":
    main()
