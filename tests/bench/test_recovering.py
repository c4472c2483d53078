"""What the recovery benchmark goes by: orders to die, a log that keeps nothing, and how joins and deaths are judged."""

import os
import signal
from pathlib import Path

import pytest

from bench.recovering.boundary import Turns, rows_of
from bench.recovering.deaths import Deaths, Third, death_rows, third_rows
from bench.recovering.fate import Fate, Orders
from bench.recovering.joins import Join, judged
from bench.recovering.leader import Restarts
from bench.recovering.leader import rows_of as restart_rows
from bench.recovering.worker import FETCHED, MODE_FILE, SPILLING_BYTES, WELCOMED, Diary, Mode, TurnedLog
from skein.plan.ops import Direction
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import HopKey
from skein.types import MicrobatchId, Step
from skein.wire.extra import DType
from worker.bundle import WireTensor

KEYS = [HopKey(Direction.FORWARD, Phase.TRAIN, Step(0), MicrobatchId(m), 1) for m in range(3)]
NUM_BYTES = SPILLING_BYTES * 2 // 5
BUNDLE = (WireTensor(name="x", dtype=DType.UINT8, shape=(NUM_BYTES,), data=bytes(NUM_BYTES)),)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process would have been sent."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    return sent


def test_orders_are_carried_out_once_at_the_last_moment_in_turn(tmp_path: Path, signals: list[int]) -> None:
    file = tmp_path / "orders"
    fate = Fate(file)
    fate.moment("b")
    file.write_text(Orders(at=("a", "b"), nth=2, how="freeze").model_dump_json())
    for name in ("b", "a", "c", "b"):
        fate.moment(name)
    assert signals == []
    for name in ("b", "b", "a", "b"):
        fate.moment(name)
    assert signals == [signal.SIGSTOP]
    assert not file.exists()


def test_a_log_keeps_what_the_file_says_from_the_next_step_on(tmp_path: Path) -> None:
    log = TurnedLog(tmp_path / MODE_FILE)
    kept = {}
    for step, mode in enumerate(Mode):
        (tmp_path / MODE_FILE).write_text(mode)
        log.drop_steps(Step(step))
        keys = [key._replace(step=Step(step + 1)) for key in KEYS]
        for key in keys:
            log.put(key, BUNDLE)
        spilled = log.num_spilled_bytes
        assert [log.get(key) is not None for key in keys] == [True] * 3
        kept[mode] = (log.num_bytes, spilled, [log.get(key) is not None for key in keys])
    log.close()
    assert kept == {
        Mode.MEMORY: (3 * NUM_BYTES, 0, [True] * 3),
        Mode.DISK: (2 * NUM_BYTES, NUM_BYTES, [True] * 3),
        Mode.NOTHING: (0, 0, [False] * 3),
    }


def test_a_diary_has_the_first_of_many_alike_but_every_fetched_version(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    for moment in (WELCOMED, "before Build", FETCHED, FETCHED, "after OpEnded Loss", "after OpEnded Loss"):
        diary.moment(moment)
    lines = (tmp_path / "diary").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [WELCOMED, FETCHED, FETCHED, "after OpEnded Loss"]


def test_a_join_is_judged_from_its_hello_to_its_first_contribution() -> None:
    commits = [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 8.0, 9.0]
    moments = [
        (4.2, WELCOMED),
        (4.8, FETCHED),  # of version 4, while 4 are committed: it lacks nothing
        (5.1, FETCHED),
        (7.0, "after OpEnded Backward"),
        (7.5, "after OpEnded Backward"),
    ]
    found = judged(moments, commits, fetched=4, began_s=4.1, num_lost=0)
    assert found == Join(before_s=1.0, during_s=(1.0, 1.5, 1.5), num_steps=2, num_lost=0)
    assert found.ratio == pytest.approx(4 / 3)
    late = judged(moments, commits, fetched=3, began_s=4.1, num_lost=0)
    assert (
        late.num_steps == 1
    )  # at 5.1 s it has version 4 and lacks 5: it is never current, so the last time counts


def test_rows_hold_within_their_goals_and_not_beyond() -> None:
    def third(lost: int) -> Third:
        return Third(num_lost=lost, seconds=2.0, num_doubled=0, backup_every=20)

    turns = Turns()
    for mode, found in ((Mode.NOTHING, [1.0, 2.0]), (Mode.MEMORY, [1.02, 2.04]), (Mode.DISK, [1.1, 2.2])):
        turns.medians[mode].extend(found)
    assert [row.holds for row in rows_of(turns)] == [True, False]
    assert [row.holds for row in third_rows([third(0), third(1)], [third(20), third(3)])] == [False, True]
    waits = Restarts(actor_s=(3.0, 11.0), host_s=(9.0, 5.0), num_lost=0, num_doubled=0, num_commits=9)
    assert [row.holds for row in restart_rows(waits)] == [False, True, True]


def test_the_step_that_suffers_is_judged_by_its_p95() -> None:
    quick, slow = (1.2,) * 19, (5.0,)
    deaths = [
        Deaths(median_s=1.0, suffering_s=found, incidents=(), num_lost=0, num_doubled=0)
        for found in (quick + slow, quick[:9] + slow)
    ]
    assert [death_rows(one)[0].holds for one in deaths] == [True, False]
