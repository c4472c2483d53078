"""`run_coordinator`: brings a coordinator up on Ray, shows its log, and takes everything down again.

Rules of this file
- What can be refused is refused before Ray is started, in one line with cause and cure.
- Whatever happens to this process, nothing that it started outlives it by more than about a second: the actor watches
  it, and a guard of its own ends the rest.
- Ray's environment is set before Ray is imported, and set whole: nothing is left to what a machine happens to have.
- A failure of Ray ends with the last lines of Ray's own log, which is kept in the state directory.
"""

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

from coordinator.identity.office import ADMIN_FILE
from coordinator.identity.office import FOLDER as AUTHORITY_FOLDER
from coordinator.launch.environment import (
    current_folder,
    joining_environment,
    ray_environment,
    set_environment,
)
from coordinator.launch.folder import RayFolder, take_folder
from coordinator.launch.guard import GIVE_UP_S
from coordinator.launch.raylog import RayFailedError, RayGoneError, with_ray_log
from coordinator.records.store import LOCK_FILE
from coordinator.serving import LOCK_WAIT_S, ServingOptions
from coordinator.telling.logs import LOG_FILE, LogFollower
from skein.config.quota import QuotasSpec, parse_quotas
from skein.errors import SkeinError, UserError
from skein.own import install_hint
from skein.storage.outside import is_full
from skein.storage.places import Places
from skein.storage.roots import EVERYTHING
from skein.units import format_bytes
from skein.wire.channel import is_loopback, join_address, split_address, try_address
from skein.wire.process.logs import LogFormat

if TYPE_CHECKING:
    from coordinator.host.cluster import Cluster

DEFAULT_PORT = 7411
DEFAULT_METRICS_PORT = 7412
DEFAULT_ENROL_PORT = 7413
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - only compared with
START_BYTES = 1 << 20
"""Bytes that the log and its files take until the first step."""
_TICK_S = 0.5
AGAIN_S = 60.0
"""A launcher whose Ray is gone starts anew by itself, but not if it did so within this time: then the cause stays."""
_AGAIN = "SKEIN_BEGAN_AGAIN_AT"
"""Variable by which a launcher knows that it has started anew, and when: seconds of this machine's monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions(ServingOptions):
    """Options that an operator decides about one coordinator: how it serves, and what it runs on.

    `advertise` may be a host alone here.
    """

    port: int = DEFAULT_PORT
    metrics_port: int | None = DEFAULT_METRICS_PORT
    enrol_port: int = DEFAULT_ENROL_PORT
    allow_insecure: bool = False
    """Listen beyond this machine in the clear, and without certificates."""
    is_standby: bool = False
    """Do not lead while another coordinator on the same state directory does."""
    ray_address: str | None = None
    """Head of a cluster that is there already, host:port; None: one of our own."""
    num_cpus: int = 2
    """CPUs that our own cluster may use at once for planning."""
    object_store_bytes: int = 80 << 20
    """Object store of our own cluster; nothing large goes through it. Ray takes no less than 75 MiB."""
    log_format: LogFormat = "text"
    data_roots: tuple[Path, ...] = ()
    """Folders: jobs whose data lie elsewhere are refused. None: that is left to the workers."""
    quotas_file: Path | None = None
    """YAML that says what namespaces may take; None: whatever there is."""
    checkpoint_roots: tuple[str, ...] = ()
    """Folders, or URLs of buckets, outside of which no `checkpoint.url` leads. None: one of our own."""


FAILED, USAGE = 1, 2
"""Exit codes."""


class _StopAskedError(Exception):
    """SIGTERM, SIGINT or SIGHUP came."""


def run_coordinator(options: CoordinatorOptions) -> int:
    """Run until SIGTERM, SIGINT or SIGHUP; gives the exit code: 0 done, 1 failed, 2 wrong options.

    One line on standard output says when it serves.
    """
    try:
        _check(options)
    except UserError as error:
        return _fail(error, USAGE)
    try:
        with _Signals() as signals, ExitStack() as undo:
            _run(options, signals, undo)
    except _StopAskedError:
        return 0
    except SkeinError as error:
        if isinstance(error, RayGoneError) and not _began_again_lately():
            print(f"warning: {error}; starts anew by itself", file=sys.stderr, flush=True)
            _begin_again()
        return _fail(error, FAILED)
    return 0


def _began_again_lately() -> bool:
    began_s = float(os.environ.get(_AGAIN, "-inf"))
    return time.monotonic() - began_s < AGAIN_S


def _begin_again() -> NoReturn:
    """Become the same command anew, with the same process id: what Ray keeps in this process cannot be cleared up."""
    os.environ[_AGAIN] = str(time.monotonic())
    sys.stdout.flush()
    with suppress(ChildProcessError):
        # Dead processes of Ray: the new program has no Popen that waits for them.
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Sockets of Ray, which are inherited.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _fail(error: SkeinError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def _check(options: CoordinatorOptions) -> None:
    """Refuse options that cannot work, whatever the machine is like."""
    if not 0 < options.port < 2**16:
        raise UserError("port", options.port, "give a port between 1 and 65535")
    if options.lease_s < 0.5:
        raise UserError("lease_s", options.lease_s, "give at least 0.5 s: shorter ones end by chance")
    if options.takeover_s < 0.5:
        raise UserError("takeover_s", options.takeover_s, "give at least 0.5 s: shorter ones end by chance")
    if options.accepts_lost_log and options.is_standby:
        raise UserError("accept_lost_log", "with standby", "give it to the coordinator that is to lead now")
    if importlib.util.find_spec("ray") is None:
        raise UserError("ray", "not installed", f"install it with: {install_hint('coordinator')}")
    _ = advertised(options)
    _ = places_of(options)
    _ = quotas_of(options)


def needs_certificates(options: CoordinatorOptions) -> bool:
    """Whether callers need certificates: where it is asked for, and by itself beyond this machine."""
    return options.has_certificates or not (options.allow_insecure or is_loopback(options.host))


def places_of(options: CoordinatorOptions) -> Places:
    """Places that jobs may name."""
    places = Places.of(options.data_roots, options.checkpoint_roots)
    # The coordinator reads no data itself, so where nobody says otherwise the roots of the workers are what counts.
    return places if options.data_roots else replace(places, data=EVERYTHING)


def quotas_of(options: CoordinatorOptions) -> QuotasSpec:
    """Quotas of namespaces, as the operator's file has them.

    Raises:
        UserError: it cannot be read, or something is wrong with what it says.
    """
    path = options.quotas_file
    if path is None:
        return options.quotas
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = f"cannot be read ({error}): give a YAML file with default and namespaces"
        raise UserError("quotas", str(path), hint) from error
    return parse_quotas(text, origin=str(path))


_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Signals:
    """Whether SIGTERM, SIGINT or SIGHUP came. A signal only sets a flag: an exception would break a call of Ray's."""

    def __init__(self) -> None:
        self._came = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _STOPPING}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:  # As nohup leaves it.
            del self._before[signal.SIGHUP]
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def install(self) -> None:
        """Be the one who hears them; Ray makes itself that."""
        for number in self._before:
            signal.signal(number, self._stop)

    def check(self) -> None:
        """Wanted wherever something is waited for.

        Raises:
            _StopAskedError: one came.
        """
        if self._came:
            raise _StopAskedError

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True


def _run(options: CoordinatorOptions, signals: _Signals, undo: ExitStack) -> None:
    state_dir = _prepare(options, signals)
    if options.ray_address is None:
        if not options.is_standby:
            _wait_for_lock(state_dir, signals)
        _require_free("listen", options.host, options.port)
        if needs_certificates(options):
            _require_free("enrol_port", options.host, options.enrol_port)
        if options.metrics_port is not None:
            _require_free("metrics_port", options.metrics_host, options.metrics_port)
    undo.callback(LogFollower(_log_file(options, state_dir), sys.stderr).close)
    folder = _take_ray_folder(state_dir, undo).path if options.ray_address is None else None
    try:
        cluster = _start_ray(options, folder, state_dir)
        undo.callback(cluster.leave)
        signals.install()
        _host(options, state_dir, cluster, signals, undo)
    except RayFailedError as error:
        if folder is None:
            raise
        # The folder with Ray's log is removed as soon as this function is left.
        raise with_ray_log(error, folder, state_dir) from error


def _prepare(options: CoordinatorOptions, signals: _Signals) -> Path:
    """The state directory, made and whole; on a full disk, once there is room."""
    state_dir, is_told = options.state_dir.expanduser().resolve(), False
    while True:
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=state_dir) as probe:
                os.posix_fallocate(probe.fileno(), 0, START_BYTES)
            return state_dir
        except OSError as error:
            if not is_full(error):
                hint = f"{error.strerror}; give a directory that you can write"
                raise UserError("state_dir", str(state_dir), hint) from error
            if not is_told:
                line = f"waiting: {error.strerror}: a start needs {format_bytes(START_BYTES)} in {state_dir}; make room"
                print(line, file=sys.stderr, flush=True)
                is_told = True
        signals.check()
        time.sleep(_TICK_S)


def _log_file(options: CoordinatorOptions, state_dir: Path) -> Path:
    """Two who share a directory do not share a log file: each replaces its own when that is large."""
    return state_dir / (f"standby-{options.port}.log" if options.is_standby else LOG_FILE)


def advertised(options: CoordinatorOptions) -> str:
    """host:port by which others reach the coordinator."""
    given = options.advertise
    if given is not None and ":" in given.rpartition("]")[2]:
        return join_address(*split_address("advertise", given))
    host = given or (socket.gethostname() if options.host in EVERYWHERE else options.host)
    return join_address(host, options.port)


def _wait_for_lock(state_dir: Path, signals: _Signals) -> None:
    """Find out early whether another coordinator is here; one that is just going is waited for."""
    give_up, is_told = time.monotonic() + LOCK_WAIT_S, False
    with (state_dir / LOCK_FILE).open("a+b") as lock:
        while True:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
                return
            except BlockingIOError as error:
                holder = os.pread(lock.fileno(), 32, 0).decode(errors="replace").strip() or "unknown"
                if time.monotonic() >= give_up:
                    hint = f"the coordinator with process id {holder} is using it; stop that one first"
                    raise UserError("state_dir", str(state_dir), hint) from error
                if not is_told:
                    line = f"waiting up to {LOCK_WAIT_S:.0f} s for process {holder} to leave {state_dir}"
                    print(line, file=sys.stderr, flush=True)
                    is_told = True
            signals.check()
            time.sleep(0.1)


def _require_free(field: str, host: str, port: int) -> None:
    try:
        try_address(host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = f"{reason}; give another one, or end what listens there"
        raise UserError(field, join_address(host, port), hint) from error


# --- Ray ---


def _take_ray_folder(state_dir: Path, undo: ExitStack) -> RayFolder:
    """A private folder for the files of a cluster of our own; a guard removes it with the cluster."""
    folder = take_folder(state_dir)
    undo.callback(folder.close)
    if not folder.path.is_relative_to(state_dir):
        print(f"Ray's files are in {folder.path}, for {state_dir} cannot carry its sockets", file=sys.stderr)
    undo.callback(_Guard(folder).close)
    return folder


def _start_ray(options: CoordinatorOptions, folder: Path | None, state_dir: Path) -> "Cluster":
    """Start a cluster in `folder`; None: connect to the one at the address given."""
    try:
        ours = joining_environment(os.environ) if folder is None else ray_environment(folder)
    except OSError as error:
        raise UserError(
            "state_dir", str(folder), f"{error.strerror}; Ray's token cannot be written"
        ) from error
    removed = set_environment(os.environ, ours, is_own=folder is not None)
    if removed:
        print(f"Ray does not get these variables of the environment: {', '.join(removed)}", file=sys.stderr)
    with current_folder(state_dir if folder is None else folder):
        return _in_cluster(options, folder)


def _in_cluster(options: CoordinatorOptions, folder: Path | None) -> "Cluster":
    # Ray reads its environment when it is imported.
    from coordinator.host import cluster

    try:
        if folder is None:
            assert options.ray_address is not None
            return cluster.connect(options.ray_address, allow_insecure=options.allow_insecure)
        return cluster.start_local(
            folder, num_cpus=options.num_cpus, object_store_bytes=options.object_store_bytes
        )
    except SystemExit as error:
        # Ray's own answer to SIGTERM, while it starts.
        raise _StopAskedError from error


class _Guard:
    """A process that ends what this one started, when this one is gone."""

    def __init__(self, folder: RayFolder) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coordinator.launch.guard", str(folder.path)],
            # Until it has cleared up nobody else may use the folder.
            pass_fds=(folder.lock,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Have it do its work, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=2 * GIVE_UP_S)


def _host(
    options: CoordinatorOptions, state_dir: Path, cluster: "Cluster", signals: _Signals, undo: ExitStack
) -> None:
    from coordinator.host.actor import HostOptions, Launcher
    from coordinator.host.cluster import HostActor

    is_own = options.ray_address is None
    serving = replace(
        options,
        state_dir=state_dir,
        advertise=advertised(options),
        name=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        places=places_of(options),
        quotas=quotas_of(options),
        has_certificates=needs_certificates(options),
    )
    host = HostActor.bring_up(
        HostOptions(
            serving=serving,
            is_standby=options.is_standby,
            log_file=_log_file(options, state_dir),
            launcher=Launcher.this_process() if is_own else None,
            log_format=options.log_format,
        ),
        cluster,
    )
    undo.callback(host.end)
    while (address := host.listens(_TICK_S)) is None:
        signals.check()
    if options.is_standby:
        print(f"skein coordinator stands by on {address} state={state_dir}", flush=True)
    while (serves := host.serves(_TICK_S)) is None:
        signals.check()
    if serving.has_certificates:
        print(f"skein identity of its admin: {state_dir / AUTHORITY_FOLDER / ADMIN_FILE}", flush=True)
    metrics = "" if serves.metrics_address is None else f" metrics=http://{serves.metrics_address}/metrics"
    print(
        f"skein coordinator ready on {serves.address} epoch={serves.epoch} state={state_dir}{metrics}",
        flush=True,
    )
    while (reason := host.ended(_TICK_S)) is None:
        signals.check()
    if reason:
        raise UserError("coordinator", serves.address, f"{reason}; the state is intact, see {state_dir}")
