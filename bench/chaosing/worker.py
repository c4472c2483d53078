"""`python -m bench.chaosing.worker FILE`: an ordinary worker that dials its peers where FILE says."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.chaosing.wires import ChaosWorker
from bench.emulated.fleet import WORKER_HOST
from bench.stub import run_stub
from worker.process import WorkerSetting


def behind_wires(worker: ChaosWorker, setting: WorkerSetting) -> WorkerSetting:
    """`setting` with peers dialled through wires that can be cut."""
    return replace(setting, way_to=lambda address: worker.ways[address])


def main() -> int:
    """Be the worker that the file describes."""
    worker = ChaosWorker.model_validate_json(Path(sys.argv[1]).read_bytes())
    adapt = partial(behind_wires, worker)
    return run_stub(adapt, join=worker.join, name=worker.name, listen=WORKER_HOST, port=worker.port)


if __name__ == "__main__":
    sys.exit(main())
