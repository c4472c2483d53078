"""What `skein doctor` finds out about certificates: one's own, and who is at the other end."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from client.cli import run
from client.doctor.certificates import look_at_identity
from client.doctor.finding import DoctorFinding, Verdict, wrong
from client.doctor.way import look_along
from skein.wire.channel import join_address, split_address
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import COORDINATOR, Caller, CallerRole, worker_caller
from skein.wire.identity.passport import Passport
from tests.client.scripted import Script, serving

NOW_S = 1_800_000_000.0
LIFE_S = 3600.0
ME = Caller(name="me", role=CallerRole.ADMIN)


@dataclass(frozen=True)
class Cluster:
    """Where a coordinator with a certificate listens, and who makes certificates out."""

    address: tuple[str, int]
    authority: Authority

    def try_with(self, passport: Passport | None) -> DoctorFinding:
        return list(look_along(*self.address, passport))[-1]


@pytest.fixture(scope="module")
def real_s() -> float:
    """Certificates are judged by the library, which reads this machine's clock."""
    return time.time()


@pytest.fixture(scope="module")
def cluster(real_s: float) -> Iterator[Cluster]:
    authority = Authority.new(now_s=real_s)
    wallet = Wallet(authority.make_out(COORDINATOR, now_s=real_s))
    with serving(Script(), credentials=Credentials(wallet=wallet)) as target:
        yield Cluster(split_address("target", target), authority)


def test_a_good_identity_is_taken(cluster: Cluster, real_s: float) -> None:
    finding = cluster.try_with(cluster.authority.make_out(ME, now_s=real_s))
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith("TLSv1.3 with the coordinator, whose certificate ends ")


def test_the_command_asks_by_it_what_it_asks_without(
    cluster: Cluster, real_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "identity"
    cluster.authority.make_out(ME, now_s=real_s).save(path)
    at = join_address(*cluster.address)
    run(["doctor", "--role", "client", "--json", "--coordinator", at, "--identity", str(path)])
    found = {one["check"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found.keys() >= {"identity", "coordinator", "link", "workers"}
    assert "runs release" in found["coordinator"]["found"]


def test_a_coordinator_that_asks_for_certificates_is_told_from_another_service(cluster: Cluster) -> None:
    finding = cluster.try_with(None)
    assert (finding.check, finding.verdict) == ("service", Verdict.FAILED)
    assert finding.found.endswith("wants TLS")


def test_an_identity_of_another_cluster_is_told_so(cluster: Cluster, real_s: float) -> None:
    finding = cluster.try_with(Authority.new(now_s=real_s).make_out(ME, now_s=real_s))
    assert finding.found.startswith("another authority vouches for who answers there")


def test_an_identity_that_the_coordinator_refuses_is_told_so(cluster: Cluster, real_s: float) -> None:
    ended = cluster.authority.make_out(ME, now_s=real_s - 2 * LIFE_S, life_s=LIFE_S)
    finding = cluster.try_with(ended)
    assert finding.found.startswith("the coordinator does not take this identity")


@pytest.mark.parametrize(
    ("name", "age_s", "found"),
    [
        (COORDINATOR, 2 * LIFE_S, "the coordinator's certificate has ended, by this machine's clock"),
        (
            COORDINATOR,
            -2 * LIFE_S,
            "the coordinator's certificate does not count yet, by this machine's clock",
        ),
        (worker_caller("w1"), 0.0, "who answers there is not the coordinator"),
    ],
)
def test_a_server_that_is_not_who_it_should_be_is_told_apart(
    name: Caller, age_s: float, found: str, cluster: Cluster, real_s: float
) -> None:
    wallet = Wallet(cluster.authority.make_out(name, now_s=real_s - age_s, life_s=LIFE_S))
    with serving(Script(), credentials=Credentials(wallet=wallet)) as target:
        other = Cluster(split_address("target", target), cluster.authority)
        assert other.try_with(cluster.authority.make_out(ME, now_s=real_s)).found == found


def test_a_service_without_certificates_is_told_so(cluster: Cluster, real_s: float) -> None:
    with serving(Script()) as target:
        other = Cluster(split_address("target", target), cluster.authority)
        finding = other.try_with(cluster.authority.make_out(ME, now_s=real_s))
    assert finding.found == "what listens there does not speak TLS"


@pytest.mark.parametrize(
    ("later_s", "verdict", "found"),
    [
        (0.0, "ok", "admin me, until "),
        (LIFE_S - 60, "warning", "admin me, until "),
        (LIFE_S + 60, "failed", "the certificate of admin me ended at "),
        (-LIFE_S, "failed", "the certificate of admin me counts from "),
    ],
)
def test_an_identity_is_judged_by_this_machine_s_clock(
    later_s: float, verdict: str, found: str, tmp_path: Path
) -> None:
    path = tmp_path / "identity"
    Authority.new(now_s=NOW_S).make_out(ME, now_s=NOW_S, life_s=LIFE_S).save(path)
    finding, passport = look_at_identity(path, now=lambda: NOW_S + later_s)
    assert (finding.verdict, passport is None) == (verdict, verdict == "failed")
    assert finding.found.startswith(found)
    assert finding.cure or verdict == "ok"


def test_an_identity_that_others_can_read_is_of_no_use_and_none_is_doubtful(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Authority.new(now_s=NOW_S).make_out(ME, now_s=NOW_S).save(path)
    path.chmod(0o644)
    assert look_at_identity(path) == (
        wrong("identity", str(path), f"other users can read it; run: chmod 600 {path}"),
        None,
    )
    finding, passport = look_at_identity(None)
    assert (finding.verdict, finding.found, passport) == ("warning", "none", None)


def test_the_command_stops_at_an_identity_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "identity"
    Authority.new(now_s=0.0).make_out(ME, now_s=0.0, life_s=LIFE_S).save(path)
    assert run(["doctor", "--role", "client", "--identity", str(path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("failed   identity     the certificate of admin me ended at 1970-01-01")
    assert "join anew with a line from skein token create --role admin" in last
