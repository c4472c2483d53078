"""`python -m skein.sim`, and sizes that only it has."""

import pytest

from skein.protocol.records import GenerationOpened
from skein.sim import __main__ as command
from skein.sim.invariants import Violated
from skein.sim.scenario import FleetShape, make_world, run_to_end
from tests.support.worlds import LIMIT_S, curve_of, of_kind


def test_each_seed_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--workers", "4", "--steps", "3", "--seeds", "2", "--seed", "7", "--faults", "2"]
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", *arguments])
    assert command.main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("seed=7 finished steps=3")
    assert second.startswith("seed=8 finished steps=3")
    assert "replay=equal" in first


def test_verbose_tells_the_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", "--workers", "2", "--steps", "1", "-v"])
    assert command.main() == 0
    assert "workers gathered" in capsys.readouterr().out


def test_a_violation_names_its_seed_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise Violated("made up")

    monkeypatch.setattr(command, "run_to_end", never)
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", "--seed", "41"])
    assert command.main() == 1
    assert "seed=41 violated: made up" in capsys.readouterr().out


def test_a_thousand_workers_take_their_steps() -> None:
    job = command.make_job(stages=20, replicas=50, microbatches=100, steps=5, layers=40, hidden=128)
    world = make_world(job, FleetShape(num_workers=1000), seed=0)
    outcome = run_to_end(world, limit_s=LIMIT_S)
    assert [record.step for record in curve_of(world.log)] == list(range(5))
    assert len(of_kind(world.log, GenerationOpened)) == 1
    assert outcome.num_events > 10**5
