"""The log that `bench.log` writes is one that a coordinator could have written."""

from pathlib import Path

from bench.log import write_log
from coordinator.records.store import RunLog
from skein.protocol.log.history import History
from skein.types import JobState


def test_a_made_log_is_chained_and_replays_into_jobs_of_which_one_goes_on(tmp_path: Path) -> None:
    write_log(tmp_path, 500, 7)
    history = History()
    with RunLog.open(tmp_path, wall_s=1e6) as log:
        for record in log.read():
            history.apply(record)
    assert history.num_records == 501
    states = [history.state_of(job) for job in history.jobs]
    assert states == [JobState.FINISHED] * 6 + [None]
    assert {job.version for job in history.jobs.values()} == {67, 70}
