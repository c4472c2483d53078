"""Combiners of members' parts where one may be broken or lie, and how many members each needs."""

from typing import Annotated, Literal

from pydantic import Field

from skein.errors import UserError
from skein.spec import Spec


class CombinerSpec(Spec):
    """A way to combine what members send, with the usual answers."""

    @property
    def compares_norms(self) -> bool:
        """Whether it looks at how long whole vectors are."""
        return False

    @property
    def compares_vectors(self) -> bool:
        """Whether it looks at how far whole vectors are from each other."""
        return False

    @property
    def least_members(self) -> int:
        """Fewest members among which it has something to choose from."""
        return 1


class NoRobust(CombinerSpec):
    """Plain weighted mean: one bad member moves everybody."""

    kind: Literal["none"] = "none"


class NormClip(CombinerSpec):
    """Members whose norm exceeds `times` the median norm are scaled down to that: the cheapest rule that works."""

    kind: Literal["median_norm_clip"]
    times: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Raise this if honest members differ much in norm, for instance in their numbers of tokens."""

    @property
    def compares_norms(self) -> bool:
        return True


class TrimmedMean(CombinerSpec):
    """Mean without the `trimmed` largest and smallest of each coordinate; wants more than twice as many members."""

    kind: Literal["trimmed_mean"]
    trimmed: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of bad members that are to be borne."""

    @property
    def least_members(self) -> int:
        return 2 * self.trimmed + 1


class Krum(CombinerSpec):
    """Mean of the `chosen` members nearest to their neighbours; wants at least 2 * `bad` + 3 members."""

    kind: Literal["krum"]
    bad: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of bad members that are to be borne."""
    chosen: Annotated[int, Field(ge=1, le=1024)] = 1
    """Raise this to lose less of what honest members have learned."""

    @property
    def compares_vectors(self) -> bool:
        return True

    @property
    def least_members(self) -> int:
        return max(2 * self.bad + 3, self.bad + self.chosen + 2)


class CentredClip(CombinerSpec):
    """Iterated mean of differences from the last aggregate, each clipped to `radius` times their median norm."""

    kind: Literal["centred_clip"]
    radius: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Raise this if members' data differ much."""
    rounds: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of times the centre moves to the mean around it; more where the first centre may be far off."""

    @property
    def compares_vectors(self) -> bool:
        return True


RobustSpec = Annotated[NoRobust | NormClip | TrimmedMean | Krum | CentredClip, Field(discriminator="kind")]


def check_robust(robust: RobustSpec, num_members: int, whence: str) -> None:
    """Refuses a combiner that so few members leave nothing to choose from.

    Args:
        robust: how members are combined.
        num_members: how many there are, oneself included.
        whence: what gives that number, for people, as in "parallel.replicas gives".

    Raises:
        UserError: fewer than 2 trimmed + 1 (trimmed mean), than 2 bad + 3 or bad + chosen + 2 (Krum), or than 3.

    >>> check_robust(TrimmedMean(kind="trimmed_mean", trimmed=2), 4, "parallel.replicas gives")
    Traceback (most recent call last):
    skein.errors.UserError: aggregation.robust.trimmed: 2: needs 5 members, parallel.replicas gives 4: give at most 1
    """
    match robust:
        case TrimmedMean(trimmed=trimmed) if num_members <= 2 * trimmed:
            raise _too_few("trimmed", trimmed, 2 * trimmed + 1, num_members, whence, (num_members - 1) // 2)
        case Krum(bad=bad) if num_members < 2 * bad + 3:
            raise _too_few("bad", bad, 2 * bad + 3, num_members, whence, (num_members - 3) // 2)
        case Krum(bad=bad, chosen=chosen) if num_members < bad + chosen + 2:
            most = num_members - bad - 2
            hint = (
                f"of {num_members} members {bad} may be bad, and two more are left out: give at most {most}"
            )
            raise UserError("aggregation.robust.chosen", chosen, hint)
        case NormClip() | CentredClip() if num_members < 3:
            hint = f"of fewer than 3 members none stands out, and {whence} {num_members}: give none, or more members"
            raise UserError("aggregation.robust.kind", robust.kind, hint)
        case _:
            pass


def _too_few(field: str, value: int, least: int, num_members: int, whence: str, most: int) -> UserError:
    cure = f"give at most {most}" if most >= (1 if field == "trimmed" else 0) else "give robust: {kind: none}"
    hint = f"needs {least} members, {whence} {num_members}: {cure}"
    return UserError(f"aggregation.robust.{field}", value, hint)
