"""Warnings of services that listen beyond this machine without certificates: told at the start, and again and again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from skein.wire.channel import is_loopback
from skein.wire.credentials import Credentials

AGAIN_S = 300.0


def clear_text_warning(host: str, credentials: Credentials) -> str | None:
    """Warning for a service that listens at `host` and wants these credentials; None where nobody can listen in.

    >>> clear_text_warning("127.0.0.1", Credentials()), clear_text_warning("0.0.0.0", Credentials())
    (None, '--insecure: whoever reaches 0.0.0.0 may give orders, and reads along; use certificates, see skein init')
    """
    if credentials.wallet is not None or is_loopback(host):
        return None
    return f"--insecure: whoever reaches {host} may give orders, and reads along; use certificates, see skein init"


async def keep_warning(
    text: str, log: logging.Logger, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> NoReturn:
    """Say it now, and every `AGAIN_S` from then on: who looks at the end of a log is to see it."""
    while True:
        log.warning(text)
        await pause(AGAIN_S)
