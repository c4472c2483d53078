"""Lines of an audit log, each with the digest of the one before: what was changed, taken out or cut off is found.

Rules of this file
- A file is named by the number of its first entry, so a chain goes on from file to file and none is ever renamed.
- `head.json` beside them knows the last entry that was acknowledged: without it a cut end would not show.
- Whoever may write to the folder can make up all of it; a position that was noted elsewhere shows that, too.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from skein.errors import UserError

FOLDER = "audit"
HEAD_FILE = "head.json"
MAX_CHARACTERS = 300
"""In a field of an entry; what is beyond is left out."""
_PATTERN = f"audit-{'[0-9]' * 18}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An act: who did what to what, from which address, and what came of it."""

    wall_s: float
    who: str
    namespace: str
    host: str
    did: str
    what: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPosition:
    """A place in a chain: the number of an entry, and the digest of its line.

    >>> ChainPosition(number=7, digest="ab" * 32).text()[:6]
    '7:abab'
    """

    number: int
    digest: str

    def text(self) -> str:
        """The position to be noted elsewhere."""
        return f"{self.number}:{self.digest}"

    @classmethod
    def parse(cls, field: str, text: str) -> "ChainPosition":
        """The position of such a text.

        Raises:
            UserError: it is none; the error names `field`.
        """
        found = re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text)
        if found is None:
            raise UserError(field, text[:99], "give NUMBER:DIGEST, as skein audit verify prints it")
        return cls(number=int(found[1]), digest=found[2])


BEGIN = ChainPosition(number=0, digest="0" * 64)
"""The position before the first entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A chain that was read: where it ends, and all that is wrong with it."""

    end: ChainPosition
    faults: tuple[str, ...]


def audit_line(entry: AuditEntry, before: ChainPosition) -> bytes:
    """The line of an entry that follows `before`, without its end."""
    shown = {
        name: value[:MAX_CHARACTERS] if isinstance(value, str) else value
        for name, value in asdict(entry).items()
    }
    return json.dumps({"number": before.number + 1, **shown, "before": before.digest}).encode()


def position_of(line: bytes) -> ChainPosition | None:
    """The position after a line; None where it is no entry."""
    read = _read(line)
    return None if read is None else ChainPosition(number=read[0], digest=_digest(line))


def file_name(first: int) -> str:
    """Name of the file that begins with the entry of that number."""
    return f"audit-{first:018d}.jsonl"


def first_of(path: Path) -> int:
    """Number of the first entry of a file.

    >>> first_of(Path(file_name(12)))
    12
    """
    return int(path.stem.removeprefix("audit-"))


def chain_files(folder: Path) -> list[Path]:
    """Files of a chain, oldest first."""
    return sorted(folder.glob(_PATTERN))


def read_head(folder: Path) -> ChainPosition | None:
    """The last position that was acknowledged; None where none is remembered, or what is there is damaged."""
    try:
        found = json.loads((folder / HEAD_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    match found:
        case {"number": int(number), "digest": str(digest)}:
            return ChainPosition(number=number, digest=digest)
        case _:
            return None


def entries(folder: Path) -> Iterator[tuple[int, AuditEntry]]:
    """Entries that can be read, with their numbers; `verify_chain` says whether they are all, and as written."""
    for _, line in _lines(folder):
        if (read := _read(line.rstrip(b"\n"))) is not None:
            yield read[0], read[2]


def verify_chain(folder: Path, known: ChainPosition | None = None) -> Verified:
    """All that is wrong with the chain in a folder; `known` is a position that was noted elsewhere."""
    # First: lines that are added meanwhile are beyond it.
    head = read_head(folder)
    marks = [mark for mark in (head, known) if mark is not None]
    faults: list[str] = []
    end = BEGIN
    seen: dict[int, str] = {}
    for place, raw in _lines(folder):
        # A line without its end is being written now, or a crash cut it before it was acknowledged.
        if not raw.endswith(b"\n") and all(mark.number <= end.number for mark in marks):
            continue
        line = raw.rstrip(b"\n")
        read = _read(line)
        if read is None:
            faults.append(f"{place}: entry {end.number + 1} cannot be read")
            end = ChainPosition(number=end.number + 1, digest=_digest(line))
            continue
        number, before, _ = read
        if number > end.number + 1:
            faults.append(f"{place}: {_range(end.number + 1, number - 1)} missing before it")
        elif number <= end.number:
            faults.append(f"{place}: entry {number} stands after entry {end.number}")
        elif before != end.digest:
            faults.append(f"{place}: entry {end.number}, before it, was changed")
        end = ChainPosition(number=number, digest=_digest(line))
        seen.update({number: end.digest} if any(mark.number == number for mark in marks) else {})
    if head is None and end != BEGIN:
        faults.append(f"{HEAD_FILE} is missing or damaged: whether the end was cut off cannot be told")
    for mark in marks:
        if mark.number > end.number:
            faults.append(f"{_range(end.number + 1, mark.number)} missing at the end")
        elif mark != BEGIN and seen.get(mark.number, mark.digest) != mark.digest:
            faults.append(f"entry {mark.number} was changed")
    return Verified(end=end, faults=tuple(dict.fromkeys(faults)))


def _lines(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in chain_files(folder):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path.name} line {number}", line


def _read(line: bytes) -> tuple[int, str, AuditEntry] | None:
    """Number, digest of the line before, and entry; None for what is no entry."""
    try:
        found = json.loads(line)
        number, before = found.pop("number"), found.pop("before")
        entry = AuditEntry(**found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    texts = (before, entry.who, entry.namespace, entry.host, entry.did, entry.what, entry.outcome)
    is_whole = isinstance(number, int) and isinstance(entry.wall_s, int | float)
    return (number, before, entry) if is_whole and all(isinstance(text, str) for text in texts) else None


def _range(first: int, last: int) -> str:
    return f"entry {first} is" if first == last else f"entries {first} to {last} are"


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
