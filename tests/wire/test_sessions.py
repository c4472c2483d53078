"""Links are good once and for minutes, sessions for hours, and there are few of both."""

from skein.wire.serving.sessions import LINK_S, MAX_LINKS, MAX_SESSIONS, SESSION_S, Sessions


def test_a_link_is_good_once() -> None:
    sessions = Sessions()
    link = sessions.link(now=0.0)
    session = sessions.redeem(link, now=1.0)
    assert session is not None
    assert sessions.redeem(link, now=1.0) is None
    assert sessions.goes_on(session, now=1.0)
    assert not sessions.goes_on(link, now=1.0)


def test_links_and_sessions_end() -> None:
    sessions = Sessions()
    late, link = sessions.link(now=0.0), sessions.link(now=0.0)
    assert sessions.redeem(late, now=LINK_S) is None
    session = sessions.redeem(link, now=LINK_S - 1)
    assert session is not None
    assert sessions.goes_on(session, now=LINK_S - 2 + SESSION_S)
    assert not sessions.goes_on(session, now=LINK_S - 1 + SESSION_S)


def test_the_oldest_goes_for_a_new_one() -> None:
    sessions = Sessions()
    links = [sessions.link(now=0.0) for _ in range(MAX_LINKS + 1)]
    assert [sessions.redeem(link, now=1.0) is None for link in links[:2]] == [True, False]
    opened = [sessions.redeem(sessions.link(now=1.0), now=1.0) or "" for _ in range(MAX_SESSIONS + 1)]
    assert [sessions.goes_on(session, now=1.0) for session in opened[:2]] == [False, True]


def test_what_nobody_made_is_nothing() -> None:
    assert Sessions().redeem("", now=0.0) is None
    assert not Sessions().goes_on("", now=0.0)
