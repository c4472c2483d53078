"""A launcher ends with a reason when its actor cannot be made, or gives no sign of life any more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from coordinator.host import cluster
from coordinator.host.actor import HostOptions
from coordinator.host.cluster import ANSWER_S, Cluster, HostActor, require_closed, start_local
from coordinator.serving import Serves, ServingOptions
from skein.errors import LocalError, UserError
from skein.types import Epoch

SERVES = Serves(address="127.0.0.1:7411", metrics_address=None, epoch=Epoch(1))


@dataclass(eq=False)
class Answer:
    """What a call of the actor gives, if it gives anything."""

    value: object = None
    is_there: bool = False


@dataclass
class Actor:
    """An actor that answers signs of life while it `lives`, and everything else never or with `serves`."""

    lives: bool = True
    serves: Serves | None = None
    num_asked: int = 0

    def method(self, name: str) -> Answer:
        if name == "alive":
            self.num_asked += 1
            return Answer(is_there=self.lives)
        return Answer(self.serves, is_there=name == "ready" and self.serves is not None)


@dataclass
class Calls:
    actor: Actor
    name: str

    def remote(self) -> Answer:
        return self.actor.method(self.name)


@dataclass
class Handle:
    actor: Actor

    def __getattr__(self, name: str) -> Calls:
        return Calls(self.actor, name)


@dataclass
class FakeRay:
    """Waits for nothing: what is there is there."""

    error: Exception | None = None
    now_s: float = field(default=0.0)

    def wait(self, answers: Sequence[Answer], *, timeout: float) -> tuple[list[Answer], list[Answer]]:
        self.now_s += timeout
        there = [answer for answer in answers if answer.is_there]
        return there, [answer for answer in answers if not answer.is_there]

    def get(self, answer: Answer) -> object:
        return answer.value

    def shutdown(self) -> None:
        assert self.error is not None
        raise self.error

    def init(self, **_options: object) -> None:
        assert self.error is not None
        raise self.error

    def remote(self, _kind: type) -> "FakeRay":
        assert self.error is not None
        raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(cluster, "ray", ray)
    monkeypatch.setattr("coordinator.host.cluster.time.monotonic", lambda: ray.now_s)
    return ray


def actor_of(actor: Actor) -> HostActor:
    return HostActor(Handle(actor), Cluster())  # type: ignore[arg-type]  # it has every method


def for_ever(ask: Callable[[float], object]) -> None:
    """As a launcher waits."""
    while ask(0.5) is None:
        pass


def test_an_actor_that_never_comes_up_is_given_up(fake: FakeRay) -> None:
    host = actor_of(Actor(lives=False))
    with pytest.raises(LocalError, match=r"has not answered for 60 s: .*cannot make it"):
        for_ever(host.listens)
    assert ANSWER_S < fake.now_s < ANSWER_S + 2


def test_an_actor_that_is_gone_for_good_ends_its_launcher(fake: FakeRay) -> None:
    actor = Actor(serves=SERVES)
    host = actor_of(actor)
    assert host.serves(0.5) == SERVES
    for _ in range(1000):
        assert host.ended(0.5) is None
    actor.lives = False
    with pytest.raises(LocalError, match="has not answered for 60 s"):
        for_ever(host.ended)


def test_an_actor_that_takes_long_to_serve_and_lives_is_waited_for(fake: FakeRay) -> None:
    actor = Actor()
    host = actor_of(actor)
    for _ in range(1000):
        assert host.listens(0.5) is None
    actor.serves = SERVES
    # In 500 s, by waits of half a second.
    assert 80 < actor.num_asked < 100


def test_a_cluster_whose_folder_is_gone_hides_no_reason(fake: FakeRay) -> None:
    fake.error = NotADirectoryError(20, "Not a directory")
    Cluster().leave()


@pytest.mark.parametrize("error", [ActorDiedError(), RuntimeError("no room"), ValueError("taken")])
def test_an_actor_that_ray_refuses_is_one_line(error: Exception, fake: FakeRay, tmp_path: Path) -> None:
    fake.error = error
    options = HostOptions(
        serving=ServingOptions(state_dir=tmp_path),
        is_standby=False,
        log_file=tmp_path / "log",
        launcher=None,
        log_format="text",
    )
    with pytest.raises(LocalError, match="the coordinator's actor cannot be made: "):
        HostActor.bring_up(options, Cluster())


@pytest.mark.parametrize("host", ["10.0.0.7", "8.8.8.8", "fe80::1%eth0"])
def test_a_ray_without_a_token_is_taken_on_loopback_only(host: str) -> None:
    require_closed("a:1", "127.0.0.1", "disabled")
    with pytest.raises(UserError, match="set RAY_AUTH_MODE=token there and here"):
        require_closed("a:1", host, "disabled")


def test_a_ray_at_a_public_address_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    require_closed("a:1", "10.0.0.7", "token")
    assert not caplog.messages
    require_closed("b:1", "8.8.8.8", "token")
    assert ["b:1 is a public address" in text for text in caplog.messages] == [True]


def test_a_ray_that_does_not_come_up_in_time_is_one_line(fake: FakeRay, tmp_path: Path) -> None:
    fake.error = Exception("The current node timed out during startup.")
    with pytest.raises(LocalError, match=r"Ray does not start: The current node timed out"):
        start_local(tmp_path, num_cpus=2, object_store_bytes=80 << 20)
    fake.error = KeyError("of ours")
    with pytest.raises(KeyError):
        start_local(tmp_path, num_cpus=2, object_store_bytes=80 << 20)
