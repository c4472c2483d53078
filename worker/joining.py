"""A worker's way in by a pasted line: the identity that it has got by it before, or another one."""

import logging
import time
from pathlib import Path

from skein.errors import UserError
from skein.wire.credentials import Wallet
from skein.wire.identity.enrolling import enrol, led_by, renewed_if_due
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.passport import Passport

_log = logging.getLogger(__name__)


async def identity_by(line: JoinLine, name: str | None, default_name: str, state_dir: Path) -> Wallet:
    """Identity under `name`; the one that lies here is taken up again, renewed where that is due and can be.

    Args:
        line: names the cluster, and has the token for the first time.
        name: of the worker; None: `default_name`, or whatever it was called when the line was used first.
        default_name: for the first time.
        state_dir: where identities lie.

    Raises:
        UserError: it cannot be had; the text says what to do.
        RemoteError: no coordinator of the line can be reached.
    """
    if line.role != "worker":
        raise UserError(
            "join", line.role, "the line makes no worker; get one: skein token create --role worker"
        )
    path = state_dir / "identities" / f"{name or f'line-{line.token}'}.json"
    kept = Passport.load_if_whole(path)
    if kept is not None and kept.authority == line.authority:
        try:
            fresh = await renewed_if_due(led_by(line, kept), clock=time.time)
        except UserError as error:
            # It never counts again, and would keep this worker out whatever line it is given.
            _log.warning("the last identity is not renewed, so this worker joins anew: %s", error)
        else:
            if fresh != kept:
                fresh.save(path)
            return Wallet(fresh, path)
    made = await enrol(line, name or default_name, clock=time.time)
    made.save(path)
    return Wallet(made, path)
