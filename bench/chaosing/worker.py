"""`python -m bench.chaosing.worker FILE`: an ordinary worker that dials its peers where FILE says."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.chaosing.wires import ChaosWorker
from bench.cluster import ANY_ROOT
from bench.emulated.fleet import WORKER_HOST
from worker.daemon import WorkerOptions, run_worker
from worker.process import WorkerSetting


def behind_wires(worker: ChaosWorker, setting: WorkerSetting) -> WorkerSetting:
    """`setting` with peers dialled through wires that can be cut."""
    return replace(setting, way_to=lambda address: worker.ways[address])


def main() -> int:
    """Be the worker that the file describes."""
    worker = ChaosWorker.model_validate_json(Path(sys.argv[1]).read_bytes())
    options = WorkerOptions(
        join=worker.join,
        name=worker.name,
        listen=WORKER_HOST,
        port=worker.port,
        device="cpu",
        data_roots=(ANY_ROOT,),
        checkpoint_roots=(str(ANY_ROOT),),
    )
    return asyncio.run(run_worker(options, adapt=partial(behind_wires, worker)))


if __name__ == "__main__":
    sys.exit(main())
