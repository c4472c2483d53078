"""Findings of checks, and their verdicts."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Fine; works, but look at it; will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """Result of one check: what was found, and what to do about it unless it is fine."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether something will not work."""
        return self.verdict is Verdict.FAILED


def fine(check: str, found: str) -> DoctorFinding:
    """Finding that asks for nothing."""
    return DoctorFinding(check=check, verdict=Verdict.OK, found=found)


def doubtful(check: str, found: str, cure: str) -> DoctorFinding:
    """Finding on what works, but should be looked at."""
    return DoctorFinding(check=check, verdict=Verdict.WARNING, found=found, cure=cure)


def wrong(check: str, found: str, cure: str) -> DoctorFinding:
    """Finding on what will not work before the cure."""
    return DoctorFinding(check=check, verdict=Verdict.FAILED, found=found, cure=cure)
