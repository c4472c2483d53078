"""Services in the clear say so for as long as they run."""

import logging

import pytest

from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import COORDINATOR
from skein.wire.process.clear_text import AGAIN_S, clear_text_warning, keep_warning

WALLET = Wallet(Authority.new(now_s=0.0).make_out(COORDINATOR, now_s=0.0))


@pytest.mark.parametrize(
    ("host", "credentials", "said"),
    [
        ("127.0.0.1", NO_CREDENTIALS, None),
        ("0.0.0.0", Credentials(wallet=WALLET), None),
        ("0.0.0.0", NO_CREDENTIALS, "--insecure: whoever reaches 0.0.0.0 may give orders"),
    ],
)
def test_beyond_this_machine_what_is_in_the_clear_is_warned_of(
    host: str, credentials: Credentials, said: str | None
) -> None:
    found = clear_text_warning(host, credentials)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


class _EnoughError(Exception):
    pass


async def test_the_warning_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    now_s, told_s = 0.0, []

    async def pause(seconds: float) -> None:
        nonlocal now_s
        told_s.append((now_s, len(caplog.messages)))
        now_s += seconds
        if now_s > 3 * AGAIN_S:
            raise _EnoughError

    with caplog.at_level(logging.WARNING), pytest.raises(_EnoughError):
        await keep_warning("in the clear", logging.getLogger("test"), pause=pause)
    assert told_s == [(turn * AGAIN_S, turn + 1) for turn in range(4)]
