"""Limit on open files and connections of a process: what the system allows, less some for its own use."""

import resource

_MOST = 1 << 20
_OWN = 256
"""Files that are no connections: logs, databases, libraries, checkpoints on their way."""
_LEAST = 64
_MOST_CONNECTIONS = 1 << 16


def raise_open_files() -> int:
    """Lets this process open as many files as it may; how many that is. Shells give 1,024, which strangers use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def max_connections() -> int:
    """Connections that a server may take, so that files are left for everything else.

    >>> max_connections() >= 64
    True
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_LEAST, min(soft - _OWN, _MOST_CONNECTIONS))
