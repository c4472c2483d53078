"""Authorities, certificates and the files that keep them, by a clock that tests set."""

from dataclasses import replace
from pathlib import Path

import pytest

from skein.errors import UserError
from skein.wire.identity.authority import KEY_FILE, LIFE_S, Authority, key_name, requested_key
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.names import Caller, CallerRole, worker_caller
from skein.wire.identity.passport import Passport

NOW_S = 1_800_000_000.0
AUTHORITY = Authority.new(now_s=NOW_S)
WORKER = worker_caller("w-1")
PASSPORT = AUTHORITY.make_out(WORKER, now_s=NOW_S)
LINE = JoinLine(
    addresses="a:7411",
    enrol_addresses="a:7413",
    authority=AUTHORITY.pem,
    token="t",
    secret="s" * 43,
    role="worker",
)


def test_an_authority_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    made = Authority.kept_in(tmp_path / "authority", now_s=NOW_S)
    assert Authority.kept_in(tmp_path / "authority", now_s=NOW_S + 1).pem == made.pem
    assert (tmp_path / "authority" / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "authority").stat().st_mode & 0o777 == 0o700


def test_an_authority_is_not_taken_from_a_file_that_others_can_read(tmp_path: Path) -> None:
    Authority.kept_in(tmp_path, now_s=NOW_S)
    (tmp_path / KEY_FILE).chmod(0o640)
    with pytest.raises(UserError, match="other users can read it; run: chmod 600"):
        Authority.kept_in(tmp_path, now_s=NOW_S)


def test_a_passport_is_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "identity.json"
    PASSPORT.save(path)
    assert Passport.load(path) == PASSPORT
    assert path.stat().st_mode & 0o777 == 0o600
    assert PASSPORT.key not in repr(PASSPORT)


def test_a_file_that_is_no_passport_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    PASSPORT.save(path)
    path.write_text(path.read_text()[:200])
    with pytest.raises(UserError, match="is no identity"):
        Passport.load(path)


@pytest.mark.parametrize(
    ("age_s", "said"),
    [
        (-600.0, "counts from 2027-01-15 07:55:00 UTC on, in 300 s by this machine's clock: set that clock"),
        (0.0, None),
        (LIFE_S - 1, None),
        (LIFE_S + 7200, "ended at 2027-01-15 20:00:00 UTC, 2.0 h ago by this machine's clock: join anew"),
    ],
)
def test_a_certificate_counts_for_hours_and_says_when(age_s: float, said: str | None) -> None:
    fault = PASSPORT.fault(now_s=NOW_S + age_s)
    assert (fault is None) == (said is None)
    assert said is None or said in str(fault)


def test_a_certificate_is_renewed_when_a_third_of_its_life_is_left() -> None:
    assert PASSPORT.renewal_s() == pytest.approx(NOW_S + LIFE_S * 2 / 3, abs=200)


def test_a_certificate_says_whom_the_authority_named_and_nothing_of_the_request() -> None:
    caller = Caller(name="me", role=CallerRole.SUBMITTER, namespace="lab")
    named = AUTHORITY.certify(PASSPORT.request(), caller, now_s=NOW_S)
    assert replace(PASSPORT, certificate=named).caller == caller
    found, key = AUTHORITY.caller_of(named)
    assert found == caller
    assert key_name(key) == key_name(requested_key(PASSPORT.request()))


def test_a_certificate_of_another_authority_is_nobodys() -> None:
    other = Authority.new(now_s=NOW_S).make_out(WORKER, now_s=NOW_S)
    with pytest.raises(UserError, match="none of this authority"):
        AUTHORITY.caller_of(other.certificate)
    with pytest.raises(UserError, match="none of this authority"):
        AUTHORITY.caller_of("-----BEGIN")


@pytest.mark.parametrize(
    "request_", [b"", b"x" * 5000, PASSPORT.request()[:-60]], ids=["empty", "long", "cut"]
)
def test_what_is_no_signing_request_is_refused(request_: bytes) -> None:
    with pytest.raises(UserError, match="no signing request"):
        AUTHORITY.certify(request_, WORKER, now_s=NOW_S)


def test_a_pasted_line_says_all_that_it_was_made_of() -> None:
    assert JoinLine.parse("join", f"  {LINE.text()}\n") == LINE
    assert "\n" not in LINE.text()
    assert len(LINE.text()) < 1000


@pytest.mark.parametrize(
    "text", ["skein1:", "skein1:abc", LINE.text()[:-9], LINE.text()[:40], "skein1:é"], ids=range(5)
)
def test_half_a_pasted_line_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="paste the whole line"):
        JoinLine.parse("join", text)
