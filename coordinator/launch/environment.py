"""The environment and the folder that Ray gets, whatever shell, `uv run` or `pipx run` started this process.

Rules of this file
- Of the variables that Ray reads, an allow-list stays and all others are taken away: a variable of the user's shell may
  name a hook that Ray imports, a runtime environment that Ray packs, or another cluster.
- Ray never gets the folder that the user started the coordinator in. Ray puts the current folder on the import path of
  its workers, and below `uv run` it packs that folder into an archive: with the state directory below it, the archive
  contains itself and fills the disk.
- The token lives as long as the cluster that it protects. Each start makes a new one in Ray's private folder, so a
  damaged file of an earlier start cannot matter.
"""

import os
import secrets
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from coordinator.records.mirror import replace_file

RAY_TOKEN_FILE = "ray_token"  # noqa: S105 - a file name
_PREFIX = "RAY_"
_TUNING = frozenset(
    (
        "RAY_BACKEND_LOG_LEVEL",  # how much Ray's own processes log
        "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE",  # for containers with a small /dev/shm
        "RAY_memory_monitor_refresh_ms",  # 0 where a container limits memory by itself
        "RAY_memory_usage_threshold",
    )
)
_ACCESS = frozenset(
    (
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_TLS_CA_CERT",
        "RAY_TLS_SERVER_CERT",
        "RAY_TLS_SERVER_KEY",
        "RAY_USE_TLS",
    )
)
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Below `uv run` Ray would otherwise pack the current folder and start its workers by uv.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def ray_environment(folder: Path) -> dict[str, str]:
    """Environment of a cluster of our own: it reports to no server, and other users of the machine stay out.

    A process needs a token to use Ray's ports, and these listen on loopback: Ray has no setting for that on Linux, but
    takes loopback for its address when it is told that it cannot form clusters.

    Args:
        folder: private to this cluster; the token is written there.

    Raises:
        OSError: the token cannot be written.
    """
    token_file = folder / RAY_TOKEN_FILE
    replace_file(token_file, secrets.token_hex(32))
    return {
        **_ALWAYS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        # Ray's own 15 gives the actor a thirtieth of the CPU beside busy workers, and a restart takes minutes.
        "RAY_worker_niceness": "0",
    }


def joining_environment(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Environment for a cluster that is there already: the operator's way of access, `disabled` unless it names one."""
    # Never a token that happens to lie in a home directory: the operator gives both sides the same mode.
    return {**_ALWAYS, "RAY_AUTH_MODE": environment.get("RAY_AUTH_MODE", "disabled")}


def set_environment(
    environment: MutableMapping[str, str], ours: dict[str, str], *, is_own: bool
) -> tuple[str, ...]:
    """Leave of Ray's variables those on the allow-list, and set `ours`.

    Args:
        environment: usually `os.environ`; changed.
        ours: variables that the coordinator decides.
        is_own: the cluster is started by this process, so variables about access to it do not stay either.

    Returns:
        Names of the variables that were taken away, sorted; without those that `ours` sets.
    """
    staying = _TUNING if is_own else _TUNING | _ACCESS
    removed = sorted(name for name in environment if name.startswith(_PREFIX) and name not in staying)
    for name in removed:
        del environment[name]
    environment.update(ours)
    return tuple(name for name in removed if name not in ours)


@contextmanager
def current_folder(folder: Path) -> Iterator[None]:
    """Make `folder` the current one for a while. The former one may be gone: it is held open, not looked up by name."""
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
