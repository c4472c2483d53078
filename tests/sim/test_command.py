"""`python -m skein.sim`, and sizes that only it has."""

import pytest

from skein.errors import UserError
from skein.protocol.log.records import GenerationOpened
from skein.sim import __main__ as command
from skein.sim.judging.invariants import Violated
from skein.sim.scenario import LIMIT_S, FleetShape, curve_of, make_world, run_to_end
from skein.sim.shapes import shape_of
from tests.support.worlds import of_kind


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


def test_a_hundred_workers_take_their_steps() -> None:
    """A thousand are for `make scale`, which takes a minute."""
    job = command.make_job(stages=10, replicas=10, microbatches=20, steps=3, layers=20, hidden=128)
    world = make_world(job, FleetShape(num_workers=100), seed=0)
    outcome = run_to_end(world, limit_s=LIMIT_S)
    assert [record.step for record in curve_of(world.log)] == list(range(3))
    assert len(of_kind(world.log, GenerationOpened)) == 1
    assert outcome.num_events > 10**4


def test_seeds_are_judged_in_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "any", "--seeds", "2", "--processes", "2"]
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", *arguments])
    assert command.main() == 0
    told = capsys.readouterr()
    assert told.out == "2 seeds from 0 on, any, 8 faults each: no violation\n"
    assert told.err.splitlines()[-1].startswith("2 of 2 seeds")


def test_a_seed_that_fails_is_told_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise Violated("made up")

    monkeypatch.setattr(command, "judge", never)
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", "--shape", "any", "--seed", "3", "--seeds", "2"])
    assert command.main() == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "reproduce: python -m skein.sim --shape 'loop 3x2 tied' --faults 8 --seed 3 --trace"


def test_a_trace_tells_what_each_worker_hears(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["python -m skein.sim", "--shape", "line 2x2", "--trace"])
    assert command.main() == 0
    out = capsys.readouterr().out
    assert "w0003 e0 g0 v0 StreamOpened" in out
    assert "fault: " in out


def test_a_shape_that_says_nothing_known_is_refused() -> None:
    for text in ("", "line", "line 2", "ring 2x2", "line 2x2 upside", "line 2x2 skip much"):
        with pytest.raises(UserError, match="shape"):
            shape_of(text)


def test_a_rule_that_nobody_knows_is_told_with_those_that_are() -> None:
    with pytest.raises(UserError, match="'chance': rules are fp32, bf16, "):
        shape_of("line 2x2 by chance")
