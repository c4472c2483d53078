"""Enrolment: calls for a certificate and for the next one, and in words what is wrong with them."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NoReturn

import grpc
from cryptography import x509
from grpc import aio

from skein.errors import RemoteError, SkeinError, UserError
from skein.wire.calling import Dial, dialled
from skein.wire.channel import Lane, open_enrolment_channel, split_address
from skein.wire.credentials import Wallet
from skein.wire.failures import error_of
from skein.wire.greeting import Coordinators
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.names import check_name
from skein.wire.identity.passport import Passport, key_text, new_key, utc_text
from skein.wire.leader import split_addresses, with_addresses
from skein.wire.v1 import identity_pb2, identity_pb2_grpc

_CALL_S = 20.0
_LOOK_AT_S = 3.0
_MAX_ADDRESSES = 8
_LOOK_S = 30.0
_MAX_SKEW_S = 240.0
"""Less than what certificates begin earlier than they are made."""
_log = logging.getLogger(__name__)

Ask = Callable[["identity_pb2_grpc.EnrolAsyncStub"], Awaitable[identity_pb2.EnrolReply]]


async def enrol(line: JoinLine, name: str, *, clock: Callable[[], float]) -> Passport:
    """An identity under `name` for the token of a line, with a key that is made here.

    Raises:
        UserError: the coordinator does not make it out, or this machine's clock is off; the text says what to do.
        RemoteError: no coordinator of the line can be reached.
    """
    check_name("name", name)
    draft = Passport(
        key=key_text(new_key()),
        certificate="",
        authority=line.authority,
        addresses=line.addresses,
        enrol_addresses=line.enrol_addresses,
    )
    wanted = identity_pb2.EnrolRequest(
        token=line.token, secret=line.secret, name=name, request=draft.request(), wall_s=clock()
    )
    return await _fulfilled(draft, lambda stub: stub.Enrol(wanted, timeout=_CALL_S), clock)


async def renewed(passport: Passport, *, clock: Callable[[], float]) -> Passport:
    """The passport with its next certificate, also where the last one has ended.

    Raises:
        UserError: the coordinator does not make it out.
        RemoteError: no coordinator can be reached.
    """
    wanted = identity_pb2.RenewRequest(certificate=passport.certificate, request=passport.request())
    return await _fulfilled(passport, lambda stub: stub.Renew(wanted, timeout=_CALL_S), clock)


async def renewed_if_due(passport: Passport, *, clock: Callable[[], float]) -> Passport:
    """The passport, with its next certificate where a third of its life or less is left.

    Nobody needs the next one while the last one counts: where none can be had, it stays.

    Raises:
        UserError: the coordinator does not make it out.
        RemoteError: the last one has ended, and no coordinator can be reached.
    """
    if clock() < passport.renewal_s():
        return passport
    try:
        return await renewed(passport, clock=clock)
    except RemoteError as error:
        if passport.fault(now_s=clock()) is not None:
            raise
        _log.warning("identity not renewed, it ends at %s: %s", utc_text(passport.ends_s), error)
        return passport


async def keep_renewed(
    wallet: Wallet, *, dial: Dial, at: Callable[[], str], clock: Callable[[], float]
) -> NoReturn:
    """Renew a wallet's certificate at whoever leads, as long as this runs; what fails is tried again and told."""
    while True:
        await asyncio.sleep(_LOOK_S)
        await renew_wallet(wallet, dial=dial, at=at(), clock=clock)


async def renew_wallet(wallet: Wallet, *, dial: Dial, at: str, clock: Callable[[], float]) -> None:
    """Renew a wallet's certificate, if that is due, at the coordinator that leads; what fails is told."""
    passport = wallet.passport
    if clock() < passport.renewal_s():
        return
    try:
        # Whoever slept past the end shows nothing that counts any more, and goes where strangers do.
        has_ended = passport.fault(now_s=clock()) is not None
        asked = renewed(passport, clock=clock) if has_ended else _renewed_at(at, passport, dial)
        wallet.take(await asked)
        _log.info("identity renewed: until %s", utc_text(wallet.passport.ends_s))
    except SkeinError as error:
        _log.warning("identity not renewed, it ends at %s: %s", utc_text(passport.ends_s), error)


async def _renewed_at(address: str, passport: Passport, dial: Dial) -> Passport:
    wanted = identity_pb2.RenewRequest(certificate=passport.certificate, request=passport.request())
    async with dialled(dial, address, Lane.CONTROL) as channel:
        try:
            reply = await identity_pb2_grpc.EnrolStub(channel).Renew(wanted, timeout=_CALL_S)
        except aio.AioRpcError as error:
            raise error_of(error, address) from error
    return _made_out(passport, reply)


async def _fulfilled(draft: Passport, ask: Ask, clock: Callable[[], float]) -> Passport:
    def dial(address: str, _lane: Lane) -> aio.Channel:
        return open_enrolment_channel(address, draft.authority)

    failure: SkeinError = RemoteError("no address to enrol at")
    for address in split_addresses("join", draft.enrol_addresses):
        async with dialled(dial, address, Lane.CONTROL) as channel:
            try:
                reply = await ask(identity_pb2_grpc.EnrolStub(channel))
            except aio.AioRpcError as error:
                failure = error_of(error, address)
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise failure from error
                if (skew := await asyncio.to_thread(certificate_skew, address, now_s=clock())) is not None:
                    raise UserError("clock", utc_text(clock()), skew) from error
                continue
        check_clock(theirs_s=reply.wall_s, ours_s=clock())
        return _made_out(draft, reply)
    raise failure


def _made_out(draft: Passport, reply: identity_pb2.EnrolReply) -> Passport:
    """The passport with its certificate, which knows of coordinators that came after the line was made."""
    return replace(
        draft,
        certificate=reply.certificate,
        addresses=_with(draft.addresses, reply.addresses),
        enrol_addresses=_with(draft.enrol_addresses, reply.enrol_addresses),
    )


def led_by(line: JoinLine, passport: Passport) -> Passport:
    """The passport, which goes where a line leads now, and then where it went before."""
    return replace(
        passport,
        addresses=_with(line.addresses, passport.addresses),
        enrol_addresses=_with(line.enrol_addresses, passport.enrol_addresses),
    )


def learn_coordinators(wallet: Wallet, coordinators: Coordinators) -> None:
    """Have a passport, and its file, name these coordinators behind those that it names already."""
    passport = wallet.passport
    fresh = replace(
        passport,
        addresses=_with(passport.addresses, ",".join(coordinators.addresses)),
        enrol_addresses=_with(passport.enrol_addresses, ",".join(coordinators.enrol_addresses)),
    )
    if fresh != passport:
        try:
            wallet.take(fresh)
        except UserError as error:
            _log.warning("the identity's file does not name all coordinators: %s", error)


def _with(known: str, others: str) -> str:
    """Addresses with others behind them: those known lead here, by whatever way.

    >>> _with("a:1,b:1", "c:1,b:1"), _with("a:1", "")
    ('a:1,b:1,c:1', 'a:1')
    """
    return ",".join(with_addresses([x for x in known.split(",") if x], [x for x in others.split(",") if x]))


def check_clock(*, theirs_s: float, ours_s: float) -> None:
    """Returns if the clock of a newcomer, ours, is near that of the coordinator.

    Raises:
        UserError: it is not; the text says by how much.
    """
    if abs(ours_s - theirs_s) > _MAX_SKEW_S:
        way = "ahead of" if ours_s > theirs_s else "behind"
        hint = f"this machine's clock is {abs(ours_s - theirs_s):.0f} s {way} the coordinator's; set it right"
        raise UserError("clock", utc_text(ours_s), hint)


def certificate_skew(address: str, *, now_s: float) -> str | None:
    """Line on a clock by which the certificate that is shown at `address` is not in force; None where it is.

    Blocks for up to `_LOOK_AT_S`. Nothing is sent, and the certificate is not trusted.
    """
    host, port = split_address("join", address)
    try:
        shown = ssl.get_server_certificate((host, port), timeout=_LOOK_AT_S)
    except (TimeoutError, OSError):
        return None
    certificate = x509.load_pem_x509_certificate(shown.encode())
    begins_s = certificate.not_valid_before_utc.timestamp()
    ends_s = certificate.not_valid_after_utc.timestamp()
    if begins_s <= now_s < ends_s:
        return None
    off_s = begins_s - now_s if now_s < begins_s else now_s - ends_s
    way = "behind" if now_s < begins_s else "ahead of"
    return f"this machine's clock is at least {off_s:.0f} s {way} the coordinator's; set it right"
