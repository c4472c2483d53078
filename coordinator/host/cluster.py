"""The Ray cluster under the coordinator, and the actor in it: found or made, waited for, ended.

The environment that Ray reads has to be set before this module is imported; see `coordinator.launcher`.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol, TypeVar, cast

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.host.actor import Failed, Host, HostOptions
from coordinator.launch.raylog import RayFailedError, RayGoneError
from coordinator.serving import Serves
from skein.errors import LocalError, UserError
from skein.wire.channel import split_address

NAMESPACE = "skein"
ANSWER_S = 60.0
"""Far above what an actor takes to start, or to start again, beside busy workers."""
ASK_S = 5.0
"""Seconds between two signs of life."""
STOP_S = 10.0
CONNECT_S = 5.0
_SETTINGS_FRAME = 4
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0))
"""RFC 9113, 3.4: a connection preface with empty settings; a server answers with settings of its own."""


_log = logging.getLogger("coordinator")
_VITAL = {"gcs_server", "raylet"}
"""Names of the processes without which a cluster is none."""


class Cluster:
    """A cluster that this process is connected to.

    Args:
        processes: those that this process started and without which it is broken; none of somebody else's cluster.
    """

    def __init__(self, processes: Sequence[psutil.Process] = ()) -> None:
        self._processes = processes

    def broken(self) -> str | None:
        """Process that is gone, in words; None while none is. Ray itself would notice after a minute, or never."""
        for process in self._processes:
            if not _is_alive(process):
                return f"Ray's process {process.pid} has ended"
        return None

    def leave(self) -> None:
        """Disconnect; a cluster of our own ends. What cannot be ended is left to the guard."""
        if self.broken() is None:
            # Ray looks for its folder even now; where that is gone the reason for leaving must still be told.
            with suppress(RayError, RuntimeError, OSError):
                ray.shutdown()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_local(temp_dir: Path, *, num_cpus: int, object_store_bytes: int) -> Cluster:
    """A cluster of this process's own, on this machine only.

    Raises:
        LocalError: Ray does not start.
    """
    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(temp_dir),
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:
        # That a process of its own took too long Ray tells by an Exception that is nothing else.
        if type(error) is not Exception and not isinstance(
            error, (RayError, RuntimeError, OSError, ValueError)
        ):
            raise
        raise RayFailedError(f"Ray does not start: {_one_line(error)}") from error
    # Below a launcher that has started anew there may be dead processes of its first cluster.
    started = [child for child in psutil.Process().children() if _is_alive(child)]
    return Cluster([child for child in started if child.name() in _VITAL])


def connect(address: str, *, allow_insecure: bool = False) -> Cluster:
    """The cluster whose head is at `address`.

    Args:
        allow_insecure: also where strangers may reach it.

    Raises:
        UserError: none is there, it does not let us in, or it may let strangers in.
    """
    host = _require_head(address)
    if not allow_insecure:
        require_closed(address, host, os.environ.get("RAY_AUTH_MODE", ""))
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        hint = f"{_one_line(error)}; check that a Ray of release {ray.__version__} is there, and its token"
        raise UserError("ray", address, hint) from error
    return Cluster()


def require_closed(address: str, host: str, mode: str) -> None:
    """Returns if a Ray at this IP address may be used: what reaches one without a token has it run anything.

    Raises:
        UserError: strangers may reach it.
    """
    found = ip_address(host.partition("%")[0])
    if not found.is_loopback and mode != "token":
        hint = "who reaches a Ray without a token has it run anything: set RAY_AUTH_MODE=token there and here"
        raise UserError("ray", address, hint)
    if found.is_global:
        _log.warning(
            "ray=%s is a public address: have a firewall keep strangers from all of its ports", address
        )


def _require_head(address: str) -> str:
    """IP address of the head, which is there: Ray itself would wait for minutes, also for what speaks no HTTP/2."""
    host, port = split_address("ray", address)
    cure = "give host:port of a running Ray head, or leave --ray away"
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            found = str(connection.getpeername()[0])
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(9)
    except OSError as error:
        raise UserError("ray", address, f"{error.strerror or 'no answer'}; {cure}") from error
    if len(answer) < 4 or answer[3] != _SETTINGS_FRAME:
        raise UserError("ray", address, f"what listens there is no Ray head; {cure}")
    return found


R = TypeVar("R")


class _Method(Protocol[R]):
    def remote(self) -> "ray.ObjectRef[R]": ...


class _Handle(Protocol):
    """Methods of the actor that we call; Ray's own types do not know them."""

    alive: _Method[None]
    listens: _Method[str | Failed]
    ready: _Method[Serves | Failed]
    ended: _Method[str | Failed]
    stop: _Method[None]


class HostActor:
    """The coordinator's actor in the cluster that this process is connected to. Made by `bring_up`."""

    def __init__(self, actor: _Handle, cluster: Cluster) -> None:
        self._cluster = cluster
        self._actor = actor
        self._listens = actor.listens.remote()
        self._ready = actor.ready.remote()
        self._ended = actor.ended.remote()
        self._alive = actor.alive.remote()
        self._asked_s = time.monotonic()

    @classmethod
    def bring_up(cls, options: HostOptions, cluster: Cluster) -> "HostActor":
        """The actor of this state directory: made, or found if it lives already.

        Raises:
            LocalError: Ray cannot make it.
        """
        try:
            return cls(_make(options), cluster)
        except (RayError, RuntimeError, ValueError) as error:
            raise RayFailedError(f"the coordinator's actor cannot be made: {_one_line(error)}") from error

    def listens(self, seconds: float) -> str | None:
        """Waits so long at most; gives where the coordinator listens, None while it does not yet.

        Raises:
            LocalError: it cannot, or does not answer.
        """
        return self._asked(self._listens, seconds)

    def serves(self, seconds: float) -> Serves | None:
        """Waits so long at most; gives where the coordinator serves, None while it does not yet, or stands by.

        Raises:
            LocalError: it cannot serve.
        """
        return self._asked(self._ready, seconds)

    def ended(self, seconds: float) -> str | None:
        """Waits so long at most; gives what ended the coordinator, None while it lives.

        Raises:
            RayGoneError: Ray itself is gone.
            LocalError: Ray cannot make the actor again.
        """
        return self._asked(self._ended, seconds, "the coordinator is gone with Ray")

    def _asked(
        self,
        answer: "ray.ObjectRef[R | Failed]",
        seconds: float,
        failure: str = "the coordinator does not start",
    ) -> R | None:
        try:
            self._require_whole()
            self._require_answers()
            done, _ = ray.wait([answer], timeout=seconds)
            found = ray.get(answer) if done else None
        except RayError as error:
            self._require_whole()
            raise RayFailedError(f"{failure}: {_one_line(error)}") from error
        if isinstance(found, Failed):
            raise LocalError(found.line)
        return found

    def end(self) -> None:
        """Stop it in order, if it can be; and for good."""
        if self._cluster.broken() is not None:
            return
        with suppress(RayError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=STOP_S)
        with suppress(RayError):
            ray.kill(cast("ActorHandle[Host]", self._actor), no_restart=True)

    def _require_answers(self) -> None:
        """The actor gives signs of life: one that Ray tries to make again and again would be waited for for ever."""
        done, _ = ray.wait([self._alive], timeout=0)
        now = time.monotonic()
        if done and now - self._asked_s > ASK_S:
            ray.get(self._alive)
            self._alive, self._asked_s = self._actor.alive.remote(), now
        elif not done and now - self._asked_s > ANSWER_S:
            hint = f"{ANSWER_S:.0f} s: it is frozen, or Ray cannot make it"
            raise RayFailedError(f"the coordinator's actor has not answered for {hint}")

    def _require_whole(self) -> None:
        gone = self._cluster.broken()
        if gone is not None:
            raise RayGoneError(f"{gone}, so the coordinator stops; the state is intact, start it again")


def _make(options: HostOptions) -> _Handle:
    return cast(
        _Handle,
        ray.remote(Host)
        .options(
            name=_name(options),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            # The state directory is on this machine.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
        )
        .remote(options),
    )


def _name(options: HostOptions) -> str:
    """Name of the actor: one coordinator for each state directory, and any number of standbys."""
    digest = hashlib.sha256(str(options.serving.state_dir.resolve()).encode()).hexdigest()
    name = f"coordinator-{digest[:8]}"
    return f"{name}-{options.serving.name}" if options.is_standby else name


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
