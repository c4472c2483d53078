"""Links are good once and for minutes, sessions for hours, and there are few of both."""

from skein.wire.identity.names import Caller, CallerRole
from skein.wire.serving.sessions import LINK_S, MAX_LINKS, MAX_OF_ONE, MAX_SESSIONS, SESSION_S, Sessions

READER = Caller(name="ada", role=CallerRole.VIEWER)


def reader(number: int) -> Caller:
    return Caller(name=f"reader-{number}", role=CallerRole.VIEWER)


def test_a_link_is_good_once() -> None:
    sessions = Sessions()
    link = sessions.link(READER, now=0.0)
    session = sessions.redeem(link, now=1.0)
    assert session is not None
    assert sessions.redeem(link, now=1.0) is None
    assert sessions.reader(session, now=1.0) == READER
    assert sessions.reader(link, now=1.0) is None


def test_links_and_sessions_end() -> None:
    sessions = Sessions()
    late, link = sessions.link(READER, now=0.0), sessions.link(READER, now=0.0)
    assert sessions.redeem(late, now=LINK_S) is None
    session = sessions.redeem(link, now=LINK_S - 1)
    assert session is not None
    assert sessions.reader(session, now=LINK_S - 2 + SESSION_S) == READER
    assert sessions.reader(session, now=LINK_S - 1 + SESSION_S) is None


def test_the_oldest_goes_for_a_new_one() -> None:
    sessions = Sessions()
    links = [sessions.link(reader(number), now=0.0) for number in range(MAX_LINKS + 1)]
    assert [sessions.redeem(link, now=1.0) is None for link in links[:2]] == [True, False]
    readers = [reader(number) for number in range(MAX_SESSIONS + 1)]
    opened = [sessions.redeem(sessions.link(each, now=1.0), now=1.0) or "" for each in readers]
    assert [sessions.reader(session, now=1.0) for session in opened[:2]] == [None, readers[1]]


def test_who_asks_for_many_puts_out_nobody_but_itself() -> None:
    sessions = Sessions()
    link, kept = (sessions.link(READER, now=0.0) for _ in range(2))
    session = sessions.redeem(link, now=0.0) or ""
    greedy = [sessions.link(reader(0), now=0.0) for _ in range(MAX_LINKS)]
    assert [sessions.redeem(each, now=0.0) is None for each in greedy].count(False) == MAX_OF_ONE
    many = [sessions.redeem(sessions.link(reader(0), now=0.0), now=0.0) or "" for _ in range(MAX_SESSIONS)]
    assert [sessions.reader(each, now=0.0) is None for each in many].count(False) == MAX_OF_ONE
    assert sessions.reader(session, now=0.0) == READER
    assert sessions.redeem(kept, now=0.0) is not None


def test_what_nobody_made_is_nothing() -> None:
    assert Sessions().redeem("", now=0.0) is None
    assert Sessions().reader("", now=0.0) is None
