"""Fills in the messages of docs/troubleshooting.md from the source; `make docs` runs it, a test compares.

What a section says of cause and cure is written by hand, there. A line `<!-- messages: PLACE ... -->` names whose
messages stand below it: folders and files, of which the longest that fits counts, or classes of errors,
which go before all folders.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.refusals import HOLE, Refusal, find_refusals
from skein import __version__
from skein.wire import failures

PAGE = Path(__file__).with_name("troubleshooting.md")
_SECTION = re.compile(r"(<!-- messages: (.*?) -->\n).*?(<!-- end of messages -->)", re.S)


class Homeless(Exception):
    """Messages that no section of the page is about."""


def page() -> str:
    """The page with the messages of today.

    Raises:
        Homeless: a section is missing.
    """
    text = PAGE.read_text(encoding="utf-8")
    places = [place for match in _SECTION.finditer(text) for place in match[2].split()]
    by_place: dict[str, list[str]] = {place: [] for place in places}
    homeless = []
    for refusal in [*find_refusals(), *_failed_calls()]:
        place = home(refusal, places)
        if place is None:
            homeless.append(f"{refusal.module}: {refusal.message}")
        else:
            by_place[place].append(refusal.message)
    if homeless:
        raise Homeless("name these in a line `<!-- messages: ... -->` of the page:\n" + "\n".join(homeless))
    return _SECTION.sub(lambda match: match[1] + _listed(by_place, match[2].split()) + match[3], text)


def home(refusal: Refusal, places: Sequence[str]) -> str | None:
    """Place under which a message stands; None: nowhere."""
    classes = [place for place in places if place == refusal.kind] or [
        x for x in places if x in refusal.family
    ]
    folders = [place for place in places if "/" in place and refusal.module.startswith(place)]
    return next(iter(classes), None) or max(folders, key=len, default=None)


def _failed_calls() -> list[Refusal]:
    """Messages about calls that fail on the way, from the table of them."""
    cures = (cure.replace(__version__, HOLE) for _, _, cure in failures._CAUSES)
    module = "skein/wire/failures.py"
    return [
        Refusal(module=module, kind="call", family=frozenset(), message=f"{HOLE}: {cure}") for cure in cures
    ]


def _listed(by_place: dict[str, list[str]], places: Sequence[str]) -> str:
    messages = sorted({message for place in places for message in by_place[place]}, key=_order)
    return "".join(f"- {_code(message)}\n" for message in messages)


def _order(message: str) -> tuple[str, str]:
    return message.lstrip(f"{HOLE} .:-").lower(), message


def _code(message: str) -> str:
    """Message as it is shown word for word."""
    quiet = message.replace("\n", " ").strip()
    return f"`` {quiet} ``" if "`" in quiet else f"`{quiet}`"


def main(arguments: Sequence[str]) -> int:
    """Writes the page, or with --check only compares; 1 if it was another."""
    fresh = page()
    is_same = PAGE.read_text(encoding="utf-8") == fresh
    if not is_same and "--check" not in arguments:
        PAGE.write_text(fresh, encoding="utf-8")
    return int(not is_same and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
