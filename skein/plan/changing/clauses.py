"""The clauses of a plan's reason: some are asked for again, so each says what it is about.

`str` makes the one line that logs, records and users have of them, and `parse_clauses` reads that again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from skein.units import counted


class About(StrEnum):
    """Subject of a clause, and the words that it begins with."""

    MADE = ""
    """Making of the plan: in which way, and for whom."""
    MOVES = "moves "
    """State that the plan moves: the last but for doubts about what was measured."""
    BACK = "with "
    """Workers who hold again what they held."""
    GONE = "without "
    """Workers without whom a step goes on."""


@dataclass(frozen=True, slots=True)
class Clause:
    """A statement of a plan's reason, without a semicolon."""

    words: str
    about: About = About.MADE

    def __str__(self) -> str:
        return f"{self.about}{self.words}"


@dataclass(frozen=True, slots=True)
class Clauses:
    """A plan's reason, in order.

    >>> print(Clauses((Clause("2 stages"), Clause("1 kB of state", About.MOVES))).saying(Clause("w1 is slow")))
    2 stages; w1 is slow; moves 1 kB of state
    """

    all: tuple[Clause, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.all))

    def has(self, about: About) -> bool:
        return any(clause.about is about for clause in self.all)

    def before(self, about: About) -> "Clauses":
        """Clauses in front of the first about `about`; all if there is none."""
        places = (i for i, clause in enumerate(self.all) if clause.about is about)
        return Clauses(self.all[: next(places, None)])

    def then(self, *clauses: Clause) -> "Clauses":
        """The clauses with `clauses` at the end."""
        return Clauses((*self.all, *clauses))

    def saying(self, clause: Clause) -> "Clauses":
        """The clauses with `clause` in front of what the plan moves."""
        made = self.before(About.MOVES)
        return made.then(clause, *self.all[len(made.all) :])


def held_by(holders: Sequence[Sequence[object]], num_workers: int) -> Clause:
    """The first clause of any plan: how many of so many workers hold something, and its stages.

    Args:
        holders: of each stage.

    >>> print(held_by([["w0", "w1"], ["w1"]], 3))
    2 of 3 workers: 2 stages x 1 to 2 replicas
    """
    fewest, most = min(map(len, holders)), max(map(len, holders))
    replicas = counted(most, "replica") if fewest == most else f"{fewest} to {most} replicas"
    num_busy = len({worker for held in holders for worker in held})
    return Clause(
        f"{num_busy} of {counted(num_workers, 'worker')}: {counted(len(holders), 'stage')} x {replicas}"
    )


def and_more(others: Sequence[object]) -> str:
    """Words for all but the first of a list that is too long to tell; empty if there are no others."""
    return f" and {len(others)} more" if others else ""


def parse_clauses(text: str) -> Clauses:
    """The clauses whose `str` is `text`.

    >>> parse_clauses("2 stages; with w1 again").all[1]
    Clause(words='w1 again', about=<About.BACK: 'with '>)
    """
    first, *others = text.split("; ")
    return Clauses((Clause(first), *map(_parsed, others)))


def _parsed(words: str) -> Clause:
    about = next((x for x in About if x and words.startswith(x)), About.MADE)
    return Clause(words.removeprefix(about), about)
