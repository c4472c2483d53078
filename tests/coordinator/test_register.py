"""The register of identities, by a clock that tests set."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.identity.register import RENEWABLE_S, NewToken, NotAdmittedError, Register
from skein.errors import UserError
from skein.wire.identity.authority import LIFE_S
from skein.wire.identity.names import CallerRole
from tests.coordinator.builders import WAIT_S

NOW_S = 1_800_000_000.0
WORKER = CallerRole.WORKER


@pytest.fixture
def register(tmp_path: Path) -> Register:
    return Register(tmp_path)


def token(register: Register, *, uses: int = 1, life_s: float = 60.0) -> NewToken:
    return register.new_token(WORKER, "default", life_s=life_s, uses=uses, now_s=NOW_S)


def admit(register: Register, by: NewToken, name: str, key: str, now_s: float = NOW_S) -> None:
    register.admit(by.id, by.secret, name, key, now_s=now_s)


def test_a_token_that_ended_says_when_and_how_to_get_another(register: Register) -> None:
    by = token(register)
    with pytest.raises(
        NotAdmittedError, match=r"ended at 2027-01-15 08:01:00 UTC; get another line"
    ) as caught:
        admit(register, by, "a", "k", NOW_S + 60)
    assert "skein token create --role worker" in caught.value.hint


def test_a_use_counts_once_for_one_key_and_is_durable(tmp_path: Path) -> None:
    first = Register(tmp_path)
    by = token(first)
    admit(first, by, "a", "k")
    second = Register(tmp_path)  # the process died before the answer was sent
    admit(second, by, "a", "k")
    with pytest.raises(NotAdmittedError, match="is used up"):
        admit(second, by, "b", "other")


def test_a_certificate_that_is_asked_for_again_counts_for_no_longer_than_is_known(register: Register) -> None:
    by = token(register, life_s=LIFE_S * 2)
    admit(register, by, "a", "k")
    admit(register, by, "a", "k", NOW_S + LIFE_S - 1)
    (found,) = register.identities()
    assert found.ends_s == NOW_S + 2 * LIFE_S - 1
    other = token(register, life_s=LIFE_S * 2)
    with pytest.raises(NotAdmittedError, match="belongs to another key"):
        admit(register, other, "a", "other", NOW_S + LIFE_S + 1)


def test_callers_are_looked_up_while_the_register_is_being_written(register: Register) -> None:
    admit(register, token(register), "a", "k")
    (found,) = register.identities()
    with ThreadPoolExecutor(1) as other, register._change() as database:
        database.execute("UPDATE identities SET revoked_s = 1")
        assert not other.submit(register.is_revoked, found.caller).result(timeout=WAIT_S)
    assert register.is_revoked(found.caller)


def test_a_revoked_name_is_free_again_when_its_last_certificate_has_ended(register: Register) -> None:
    by = token(register, uses=3, life_s=LIFE_S * 2)
    admit(register, by, "a", "k")
    register.revoke(WORKER, "a", now_s=NOW_S + 1)
    with pytest.raises(
        NotAdmittedError, match="was revoked until 2027-01-15 20:00:00 UTC; give another name"
    ):
        admit(register, by, "a", "new", NOW_S + LIFE_S - 1)
    admit(register, by, "a", "new", NOW_S + LIFE_S)
    (found,) = register.identities()
    assert not register.is_revoked(found.caller)


def test_an_identity_is_renewed_by_its_key_until_long_after_its_end(register: Register) -> None:
    admit(register, token(register), "a", "k")
    (found,) = register.identities()
    for key, now_s in (("other", NOW_S), ("k", NOW_S + LIFE_S + RENEWABLE_S + 1)):
        with pytest.raises(NotAdmittedError):
            register.renew(found.caller, key, now_s=now_s)
    assert register.renew(found.caller, "k", now_s=NOW_S + LIFE_S + RENEWABLE_S) == found.caller
    assert register.identities()[0].ends_s == NOW_S + 2 * LIFE_S + RENEWABLE_S


def test_whoever_the_register_does_not_know_is_refused(register: Register, tmp_path: Path) -> None:
    admit(register, token(register), "a", "k")
    (found,) = register.identities()
    assert Register(tmp_path / "restored from nothing").is_revoked(found.caller)


@pytest.mark.parametrize(
    ("role", "life_s", "uses", "named"),
    [
        (CallerRole.COORDINATOR, 60, 1, "role"),
        (WORKER, 0, 1, "ttl"),
        (WORKER, 1e9, 1, "ttl"),
        (WORKER, 60, 0, "uses"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(
    register: Register, role: CallerRole, life_s: float, uses: int, named: str
) -> None:
    with pytest.raises(UserError) as caught:
        register.new_token(role, "default", life_s=life_s, uses=uses, now_s=NOW_S)
    assert caught.value.field == named
