"""Links by way of a relay, as they are where it carries those of several workers at once.

Workers measure such a link by itself. In a step each worker sends one tensor at a time, so among m workers that meet at
a relay up to m are under way, where the measured pair has at most two. What a relay can carry is not known; it is at
least what the quickest link by way of it has, or, at a worker, its own link that is slower of the quickest in and out.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from skein.topology.fleet import Link
from skein.types import WorkerId


def shared_links(links: Sequence[Link], known: Collection[Link]) -> tuple[Link, ...]:
    """Links of a fleet, none of them quicker by a relay than 2/m of what that carries, for m workers that meet there.

    Args:
        links: those of the fleet, as measured one by one.
        known: all that were measured, the relays' own among them.
    """
    meeting: dict[WorkerId, set[WorkerId]] = defaultdict(set)
    for link in links:
        if (relay := _third(link)) is not None:
            meeting[relay] |= {link.sender, link.receiver}
    if not meeting:
        return tuple(links)
    share = {relay: 2 / len(ends) * _carried(relay, known) for relay, ends in meeting.items()}
    return tuple(
        link
        if (relay := _third(link)) is None
        else replace(link, bytes_per_s=min(link.bytes_per_s, share[relay]))
        for link in links
    )


def _third(link: Link) -> WorkerId | None:
    """Relay of a link; None where one of its ends dials the other."""
    return None if link.via in (link.sender, link.receiver) else link.via


def _carried(relay: WorkerId, known: Iterable[Link]) -> float:
    """Bytes per second that a relay was seen to carry."""
    through = come = gone = 0.0
    for link in known:
        if link.via == relay and _third(link) is not None:
            through = max(through, link.bytes_per_s)
        elif link.receiver == relay and _third(link) is None:
            come = max(come, link.bytes_per_s)
        elif link.sender == relay and _third(link) is None:
            gone = max(gone, link.bytes_per_s)
    return max(through, min(come, gone))
