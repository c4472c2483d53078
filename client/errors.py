"""Errors between a client and its coordinator."""

import grpc
from grpc import aio

import skein
from skein.errors import SkeinError, UserError
from skein.wire.failures import error_of


class NotReachable(SkeinError):
    """The coordinator does not answer at `target`, or no longer."""

    def __init__(self, target: str, text: str) -> None:
        super().__init__(text)
        self.target = target


class VersionMismatch(SkeinError):
    """Client and coordinator are of releases that do not understand each other."""


class Refused(UserError):
    """The coordinator refused what was asked: which field, what it was, what would be right."""


class NotFound(Refused):
    """The coordinator knows no such job, worker, checkpoint or file."""


def explain_call(error: aio.AioRpcError, target: str) -> SkeinError:
    """Error that a failed call to `target` means to the caller."""
    meant, code = error_of(error, target), error.code()
    if isinstance(meant, UserError):
        kind = NotFound if code is grpc.StatusCode.NOT_FOUND else Refused
        return kind(meant.field, meant.value, meant.hint)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return NotReachable(target, str(meant))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionMismatch(str(meant))
    return meant


def check_version(target: str, protocol_version: int, release: str) -> None:
    """Returns if the coordinator at `target` speaks as we do.

    Raises:
        VersionMismatch: it does not; says which side is older.
    """
    if protocol_version == skein.PROTOCOL_VERSION:
        return
    older = "this client" if protocol_version > skein.PROTOCOL_VERSION else "the coordinator"
    raise VersionMismatch(
        f"{target}: runs release {release} (protocol {protocol_version}), here runs {skein.__version__} "
        f"(protocol {skein.PROTOCOL_VERSION}): upgrade {older}"
    )
