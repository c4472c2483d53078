"""Patience with silent holders before committed steps are given up: pure functions of what is at stake.

Rules of this file
- To wait as long as going back would take never takes more than twice as long as knowing the future would.
- A worker that has come back after a long silence may do so again: the past makes the wait longer, never shorter.
- A sign of life that a peer has seen begins the wait anew, a few times at most: a worker that lives and never gets
  through to the coordinator is of no use to the job.
"""

from collections.abc import Iterable

LEAST_S = 15.0
"""So long is waited whatever is at stake: a network that is mended after seconds, a machine that stood still, and the
worker's next try to reach the coordinator fit in. It is spent only where nobody knows of a death."""
MOST_S = 120.0
TIMES_SILENCE = 1.5
"""So many times as long as the longest silence that ended well."""
TIMES_REACHED = 3.0
"""So many times as long at most, if peers reach who is waited for."""
LONGEST_S = TIMES_REACHED * MOST_S
"""Seconds beyond which no worker is waited for; one that comes by then is asked."""


def patience_s(*, cost_s: float, silences_s: Iterable[float]) -> float:
    """Seconds to wait for a silent worker.

    Args:
        cost_s: seconds that the steps took which would be lost.
        silences_s: seconds that workers were silent for before that came back.

    >>> patience_s(cost_s=3.0, silences_s=()), patience_s(cost_s=40.0, silences_s=(8.0,))
    (15.0, 40.0)
    >>> patience_s(cost_s=3.0, silences_s=(4.0, 30.0)), patience_s(cost_s=3600.0, silences_s=())
    (45.0, 120.0)
    """
    return min(max(LEAST_S, cost_s, TIMES_SILENCE * max(silences_s, default=0.0)), MOST_S)


def waits_until(since: float, patience_s: float, seen_at: float | None) -> float:
    """Time from which a worker that is waited for since `since` is not waited for any more.

    Args:
        since: time at which it was found that steps would be given up.
        patience_s: for one silence.
        seen_at: time at which a peer reached the worker last, or it was lost; None: it was not here yet.

    >>> waits_until(100.0, 15.0, None), waits_until(100.0, 15.0, 110.0), waits_until(100.0, 15.0, 144.0)
    (115.0, 125.0, 145.0)
    """
    return min(max(since, seen_at or since) + patience_s, since + TIMES_REACHED * patience_s)


def clock_time(wall_s: float) -> str:
    """A moment as people read it.

    >>> clock_time(86400.0 * 3 + 3600.0 * 9 + 61.7)
    '09:01:01 UTC'
    """
    minutes, seconds = divmod(int(wall_s) % 86400, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02} UTC"
