"""`skein worker up`: options, exit codes and signals of one worker process.

Nothing imported here imports torch, so that commands which need no torch start where there is none.
"""

import asyncio
import importlib.util
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from skein.config.location import parse_offers
from skein.config.resources import Label
from skein.errors import RemoteError, UserError
from skein.own import install_hint
from skein.protocol.worker.worker_io import StopRequested, WorkerEvent
from skein.storage.places import Places
from skein.types import WORKER_NAME_PATTERN, Incarnation, SiteId, WorkerId
from skein.units import counted
from skein.wire.channel import join_address, require_safe_bind, split_address
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.joining import JoinLine, is_join_line
from skein.wire.identity.passport import utc_text
from skein.wire.leader import split_addresses
from skein.wire.process.logs import LogFormat
from skein.wire.process.state_dir import default_state_dir
from worker.data.cache import usual_cache
from worker.joining import identity_by
from worker.mesh.devices import claimed, parse_devices
from worker.naming import take_name
from worker.telling.logs import LogTail, begin_worker_log
from worker.transport.memory import keep_message_buffers

if TYPE_CHECKING:
    from worker.inbox import WorkerInbox
    from worker.mesh.processes import MeshLostError
    from worker.process import WorkerSetting

_log = logging.getLogger(__name__)

DONE, FAILED, USAGE = 0, 1, 2
_SWITCH_S = 0.0005
"""Seconds that the event loop waits for the interpreter while torch's thread runs Python between two operations."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - only compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options by which an operator describes a worker.

    Args:
        join: the coordinator, host:port; or it and its standbys, with commas between; or a line from
            `skein token create`, which gets this worker an identity.
        name: of this worker among all; by default the host's with a random ending. Of two with one name the newer is
            refused while the older lives; a restart here takes its place at once.
        state_dir: holds what proves that; None: the place where state lies by default.
        site: where the worker is; workers of one site are taken to be near each other.
        listen: the address that peers' tensors arrive at; beyond loopback it takes a line to join by, or `insecure`.
        port: 0 takes a free one.
        advertise: host, or host:port, that peers shall use instead; behind NAT, for instance.
        offers_relay: carry what workers send each other that cannot dial each other.
        labels: what jobs may ask for, each key once.
        devices: that compute each layer together, as `worker.mesh.devices` reads them; None: `device` alone.
        memory_bytes: that a job may use; by default most of what is free.
        offers: data, tokenizers and weights that jobs may name without knowing where they lie: NAME=PATH each.
        data_roots: folders outside of which jobs name no other; by default one of our own, unless there are `offers`.
        checkpoint_roots: folders, or URLs of buckets, outside of which no `checkpoint.url` leads; likewise.
        metrics_port: where Prometheus metrics are served, at `metrics_host`; None: they go up with the beats only.
    """

    join: str
    name: str | None = None
    site: str = "default"
    listen: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    offers_relay: bool = False
    labels: tuple[Label, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: str | None = None
    memory_bytes: int | None = None
    state_dir: Path | None = None
    insecure: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    log_format: LogFormat = "text"
    offers: tuple[str, ...] = ()
    data_roots: tuple[Path, ...] = ()
    checkpoint_roots: tuple[str, ...] = ()


def main(options: WorkerOptions) -> int:
    """Be a worker until told otherwise; the exit code."""
    return asyncio.run(run_worker(options))


async def run_worker(
    options: WorkerOptions, *, adapt: "Callable[[WorkerSetting], WorkerSetting] | None" = None
) -> int:
    """Be a worker until the coordinator or a signal ends it; the exit code: 0 done, 1 failed, 2 wrong options.

    The first SIGTERM, SIGINT or SIGHUP asks the coordinator to take the work away, the second ends the process at once.
    A SIGHUP that the process was started to ignore, as by nohup, stays ignored.

    Args:
        options: what an operator says.
        adapt: what a program that embeds the worker changes of the setting that follows from the options.
    """
    try:
        log_lines, wallet = begin_worker_log(options.log_format), None
        if is_join_line(options.join):
            options, wallet = await _enrolled(options)
        setting = _setting(options, log_lines, wallet)
        setting = setting if adapt is None else adapt(setting)
    except UserError as error:
        return _fail(error, USAGE)
    except RemoteError as error:
        return _fail(error, FAILED)
    if options.name is None:
        # Nobody else has the name: a secret of this process will do, for who comes back after a lost device.
        return await _be(replace(setting, secret=secrets.token_hex(16)) if setting.devices else setting)
    try:
        taken = take_name(options.state_dir or default_state_dir(), setting.worker, setting.join)
    except UserError as error:
        return _fail(error, FAILED)
    with closing(taken):
        if taken.warning is not None:
            _log.warning(taken.warning)
        return await _be(replace(setting, secret=taken.secret))


async def _enrolled(options: WorkerOptions) -> tuple[WorkerOptions, Wallet]:
    """Options with the name and the addresses that the pasted line leads to, and the identity.

    Raises:
        UserError | RemoteError: the line does not help.
    """
    _check_names(options)
    line, name = JoinLine.parse("join", options.join), _default_name(Incarnation(secrets.token_hex(8)))
    wallet = await identity_by(line, options.name, name, options.state_dir or default_state_dir())
    caller = wallet.passport.caller
    if (fault := wallet.passport.fault(now_s=time.time())) is not None:
        raise UserError("join", caller.name, fault)
    _log.info("identity: worker %s, until %s", caller.name, utc_text(wallet.passport.ends_s))
    return replace(options, name=caller.name, join=wallet.passport.addresses or line.addresses), wallet


async def _be(setting: "WorkerSetting") -> int:
    """Be the worker of this setting until the end; the exit code. Where a device is lost, the others come back."""
    sys.setswitchinterval(_SWITCH_S)
    keep_message_buffers()
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(setting.devices, default_state_dir() / "devices", os.environ))
        except UserError as error:
            return _fail(error, FAILED)
        except OSError as error:
            _log.warning("other meshes are not told of the devices of this one: %s", error)
        return await _go_on(setting)


async def _go_on(setting: "WorkerSetting") -> int:
    """The exit code, once nothing depends on the worker, or no device is left."""
    with _stopping() as (posts, asked):

        def on_ready(inbox: "WorkerInbox") -> None:
            posts.append(inbox.post)
            if asked:
                # The signal came while the worker was coming back, and whoever was told of it is gone.
                inbox.post(_asked_by(asked[0]))

        while True:
            end = await _incarnate(setting, on_ready)
            if isinstance(end, int):
                return end
            if asked or not end.left:
                return _fail(end, FAILED)
            setting = _smaller(setting, end)


async def _incarnate(
    setting: "WorkerSetting", on_ready: "Callable[[WorkerInbox], None]"
) -> "int | MeshLostError":
    """Exit code of one incarnation of the worker, or the loss of a device that ended it."""
    from worker.mesh.processes import MeshLostError
    from worker.process import work

    end: int | MeshLostError = FAILED
    try:
        left = await work(setting, on_ready)
        end = DONE if left.is_clean else FAILED
        _log.log(logging.INFO if left.is_clean else logging.ERROR, "exit: %s", left.reason)
    except* MeshLostError as errors:
        lost = _first(errors)
        end = lost if isinstance(lost, MeshLostError) else FAILED
    except* UserError as errors:
        _fail(_first(errors), FAILED)
    except* Exception:  # noqa: BLE001 - the outermost loop: it records, and ends the run
        _log.critical("exit: an error of our own", exc_info=True)
    return end


def _smaller(setting: "WorkerSetting", lost: "MeshLostError") -> "WorkerSetting":
    """Setting of the incarnation that goes on with the devices that are left."""
    incarnation, shown = Incarnation(secrets.token_hex(8)), ",".join(lost.left)
    _log.error("%s; incarnation=%s goes on with devices=%s", lost, incarnation, shown)
    return _with_devices(replace(setting, incarnation=incarnation), lost.left)


def _with_devices(setting: "WorkerSetting", devices: tuple[str, ...]) -> "WorkerSetting":
    """The setting of a worker with these devices: of several it is a mesh, which needs none beside them."""
    import torch

    if len(devices) == 1:
        return replace(setting, device=torch.device(devices[0]), devices=())
    return replace(setting, device=torch.device("cpu"), devices=devices)


def _fail(error: BaseException, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


@contextmanager
def _stopping() -> Iterator[tuple[list[Callable[[WorkerEvent], None]], list[str]]]:
    """Turns the first signal into an event, for the last of the first list; the second signal ends the process.

    The second list has the signal that has come.
    """
    loop = asyncio.get_running_loop()
    posts: list[Callable[[WorkerEvent], None]] = []
    asked: list[str] = []

    def on_signal(name: str) -> None:
        if asked or not posts:
            os._exit(FAILED)
        asked.append(name)
        _log.info("stopping on %s; once more ends this process at once", name)
        posts[-1](_asked_by(name))

    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)  # A terminal was closed, or an ssh session ended.
    for number in signals:
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield posts, asked
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _asked_by(name: str) -> StopRequested:
    return StopRequested(reason=f"asked to stop by {name}")


# --- options ---


def _check_names(options: WorkerOptions) -> None:
    for field, name in (("name", options.name), ("site", options.site)):
        if name is not None and re.fullmatch(WORKER_NAME_PATTERN, name) is None:
            raise UserError(field, name, "use up to 64 letters, digits, dots, dashes and underscores")


def _setting(options: WorkerOptions, log_lines: LogTail, wallet: Wallet | None) -> "WorkerSetting":
    """Setting of a worker that follows from the options here.

    Raises:
        UserError: the options are wrong by themselves.
    """
    coordinators = split_addresses("join", options.join)
    _check_names(options)
    if options.advertise is not None:
        _advertised(options, coordinators[0], 1)
    if options.memory_bytes is not None and options.memory_bytes < 1:
        raise UserError("memory", options.memory_bytes, "give a size such as 8GiB")
    credentials = Credentials(wallet=wallet)
    require_safe_bind(options.listen, credentials, allow_insecure=options.insecure)
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch", "not installed", f"install it with: {install_hint('worker')}")
    import torch

    from worker.process import WorkerSetting

    devices = () if options.devices is None else _checked_devices(options, torch.cuda.device_count())
    has_cuda = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        hint = "torch finds no GPU that it can use; give cpu, or install torch for CUDA"
        raise UserError("device", options.device, hint)
    offers = parse_offers(options.offers)
    for name, path in offers.items():
        if not path.expanduser().exists():
            _log.warning("data=%s: nothing is at %s yet: jobs that name it wait for that", name, path)
    incarnation = Incarnation(secrets.token_hex(8))
    setting = WorkerSetting(
        worker=WorkerId(options.name or _default_name(incarnation)),
        incarnation=incarnation,
        site=SiteId(options.site),
        join=options.join,
        listen=options.listen,
        port=options.port,
        address_of=lambda port: _advertised(options, coordinators[0], port),
        credentials=credentials,
        device=torch.device("cuda" if has_cuda else "cpu"),
        memory_bytes=options.memory_bytes,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        take_log_lines=log_lines.take,
        places=Places.of(options.data_roots, options.checkpoint_roots, offers),
        cache=usual_cache(),
        host=socket.gethostname(),
        offers_relay=options.offers_relay,
        labels=options.labels,
    )
    return _with_devices(setting, devices) if devices else setting


def _checked_devices(options: WorkerOptions, num_cuda: int) -> tuple[str, ...]:
    """The devices that the options name, where this machine has `num_cuda` GPUs that torch can use.

    Raises:
        UserError: there are no such devices.
    """
    assert options.devices is not None
    if options.device != "auto":
        raise UserError("devices", options.devices, "give either --device or --devices, not both")
    devices = parse_devices(options.devices)
    for device in devices:
        kind, _, number = device.partition(":")
        if kind == "cuda" and int(number) >= num_cuda:
            hint = "torch finds no GPU that it can use: give cpu:2 or so, or install torch for CUDA"
            if num_cuda:
                hint = f"torch finds {counted(num_cuda, 'GPU')} that it can use, from cuda:0 on: name those"
            raise UserError("devices", device, hint)
    return devices


def _default_name(incarnation: Incarnation) -> str:
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")
    return f"{host[:48] or 'worker'}-{incarnation[:6]}"


def _advertised(options: WorkerOptions, coordinator: str, port: int) -> str:
    """host:port by which peers reach a worker that listens at `port`."""
    given = options.advertise
    if given is not None and ":" in given.rpartition("]")[2]:
        return join_address(*split_address("advertise", given))
    host = given or options.listen
    return join_address(_own_host(coordinator) if host in _EVERYWHERE else host, port)


def _own_host(coordinator: str) -> str:
    """Address of this machine on the way to the coordinator; its host name if none is found."""
    host, port = split_address("join", coordinator)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses a way
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
