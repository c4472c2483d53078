"""The Ray cluster under the coordinator, and the actor in it: found or made, waited for, ended.

The environment that Ray reads has to be set before this module is imported; see `coordinator.launcher`.
"""

import hashlib
import logging
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.host.actor import Failed, Host, HostOptions
from coordinator.serving import Serves
from skein.errors import LocalError, UserError
from skein.wire.channel import split_address

NAMESPACE = "skein"
READY_S = 60.0
STOP_S = 10.0
CONNECT_S = 5.0


def start_local(temp_dir: Path, *, num_cpus: int, object_store_bytes: int) -> None:
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
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise LocalError(f"Ray does not start: {_one_line(error)}; its own log is in {temp_dir}") from error


def connect(address: str) -> None:
    """The cluster at `address`, or with "auto" the one of this machine.

    Raises:
        UserError: none is there, or it does not let us in.
    """
    if address != "auto":
        _require_listening(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        hint = f"{_one_line(error)}; check that a Ray of release {ray.__version__} is there, and its token"
        raise UserError("ray", address, hint) from error


def _require_listening(address: str) -> None:
    """Ray itself would wait long for an address where nothing is."""
    host, port = split_address("ray", address)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        hint = f"{error.strerror or 'no answer'}; give host:port of a running Ray head, or leave --ray away"
        raise UserError("ray", address, hint) from error


R = TypeVar("R")


class _Method(Protocol[R]):
    def remote(self) -> "ray.ObjectRef[R]": ...


class _Handle(Protocol):
    """What we call of the actor; Ray's own types do not know its methods."""

    ready: _Method[Serves | Failed]
    ended: _Method[str]
    stop: _Method[None]


class HostActor:
    """The coordinator's actor in the cluster that this process is connected to. Made by `bring_up`."""

    def __init__(self, actor: _Handle) -> None:
        self._actor = actor
        self._ready = actor.ready.remote()
        self._ended = actor.ended.remote()
        self._give_up = time.monotonic() + READY_S

    @classmethod
    def bring_up(cls, options: HostOptions) -> "HostActor":
        """The actor of this state directory: made, or found if it lives already."""
        actor = cast(
            _Handle,
            ray.remote(Host)
            .options(
                name=f"coordinator-{_short_hash(options.serving.state_dir)}",
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
        return cls(actor)

    def serves(self, seconds: float) -> Serves | None:
        """Waits so long at most; gives where the coordinator serves, None while it does not yet.

        Raises:
            LocalError: it cannot serve, or does not answer.
        """
        try:
            done, _ = ray.wait([self._ready], timeout=seconds)
            ready = ray.get(self._ready) if done else None
        except RayError as error:
            raise LocalError(f"the coordinator does not start: {_one_line(error)}") from error
        if isinstance(ready, Failed):
            raise LocalError(ready.line)
        if ready is None and time.monotonic() > self._give_up:
            raise LocalError(f"the coordinator does not answer within {READY_S:.0f} s")
        return ready

    def ended(self, seconds: float) -> str | None:
        """Waits so long at most; gives what ended the coordinator, None while it lives.

        Raises:
            LocalError: Ray itself is gone.
        """
        try:
            done, _ = ray.wait([self._ended], timeout=seconds)
            return ray.get(self._ended) if done else None
        except RayError as error:
            raise LocalError(f"the coordinator is gone with Ray: {_one_line(error)}") from error

    def end(self) -> None:
        """Stop it in order, if it can be; and for good."""
        with suppress(RayError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=STOP_S)
        with suppress(RayError):
            ray.kill(cast("ActorHandle[Host]", self._actor), no_restart=True)


def leave() -> None:
    """Disconnect; a cluster of our own ends."""
    ray.shutdown()


def _short_hash(directory: Path) -> str:
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:8]


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
