"""Network namespaces of Linux: made, entered, joined by TUN devices that we hold, and removed. Needs root and `ip`.

Rules: the root namespace is left as it is: no device, no rule, no bridge is put there. TUN devices live as long as the
process that opened them; namespaces stay until they are removed, so all of one lab share a prefix to find them by.
"""

import ctypes
import fcntl
import os
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skein.errors import SkeinError

WAN_DEVICE = "wan0"
HOME_ENDING = ".home"
"""Ending of the name of a namespace that hides another one's address."""
_FOLDER = Path("/run/netns")
_HOME_ADDRESS = "192.168.1.1"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_MTU_BYTES = 1500
_QUEUE_PACKETS = 2000
_COMMAND_S = 20.0


class NotPermitted(SkeinError):
    """This machine or user cannot have network namespaces; the text says why."""


def why_not() -> str | None:
    """Reason why network namespaces cannot be made here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "this is not Linux"
    if os.geteuid() != 0:
        return "this is not root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    name = f"skein-probe-{secrets.token_hex(4)}"
    try:
        make(name)
        os.close(open_tun(name))
    except (NotPermitted, OSError) as error:
        return str(error)
    finally:
        with suppress(NotPermitted):
            remove(name)
    return None


def make(name: str) -> None:
    """A new namespace, with loopback.

    Raises:
        NotPermitted: the system refuses; its words are in the text.
    """
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def remove(name: str) -> None:
    """Remove a namespace and the devices in it; processes in it keep it alive, so end them first."""
    if (_FOLDER / name).exists():
        _run("ip", "netns", "delete", name)


def with_prefix(prefix: str) -> list[str]:
    """Namespaces whose names begin so, sorted."""
    return sorted(path.name for path in _FOLDER.glob(f"{prefix}*")) if _FOLDER.exists() else []


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Within, this thread opens its sockets and devices in the namespace; they stay there."""
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        enter(name)
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def enter(name: str) -> None:
    """Move this thread, and the programs it becomes or starts, into the namespace from now on.

    Raises:
        NotPermitted: the system refuses.
    """
    try:
        with (_FOLDER / name).open("rb") as file:
            _set_namespace(file.fileno())
    except OSError as error:
        raise NotPermitted(f"cannot enter namespace {name}: {error.strerror}") from error


def processes_in(name: str) -> list[int]:
    """Process ids of those in the namespace, sorted."""
    try:
        wanted = (_FOLDER / name).stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if (path / "ns" / "net").stat().st_ino == wanted:
                found.append(int(path.name))
    return sorted(found)


def open_tun(name: str) -> int:
    """A TUN device in the namespace: what is sent there can be read from this descriptor, and the other way round.

    Each read and write is one frame; see `client.lab.network.router`.
    """
    request = struct.pack("16sH22x", WAN_DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    with inside(name):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(device, _TUNSETIFF, request)
        except OSError:
            os.close(device)
            raise
    return device


def set_batching(device: int, *, is_on: bool) -> None:
    """Let the kernel hand over many packets of a connection at once, which is much quicker, or each by itself."""
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 if is_on else 0)


def address(name: str, address: str) -> None:
    """Give the namespace's TUN device its address, one of a network of 16 bits, and send everything there."""
    _run("ip", "-n", name, "address", "add", f"{address}/16", "dev", WAN_DEVICE)
    _run(
        *("ip", "-n", name, "link", "set", WAN_DEVICE, "mtu", str(_MTU_BYTES)),
        *("txqueuelen", str(_QUEUE_PACKETS), "up"),
    )
    _run("ip", "-n", name, "route", "add", "default", "dev", WAN_DEVICE)


def hide(name: str, host: str, *, forwarded_port: int | None) -> None:
    """Make the namespace `name`, whose only way out is through that of its home; that one hides its address.

    Args:
        name: to be made; its home, of the same name and `HOME_ENDING`, is there already and has a WAN device.
        host: its own address, of a network of 24 bits with the home.
        forwarded_port: at which the home hands on what comes from outside; None: nothing comes in.
    """
    home = f"{name}{HOME_ENDING}"
    make(name)
    _run("ip", "link", "add", "lan0", "netns", home, "type", "veth", "peer", "name", "eth0", "netns", name)
    for space, device, own in ((home, "lan0", _HOME_ADDRESS), (name, "eth0", host)):
        _run("ip", "-n", space, "address", "add", f"{own}/24", "dev", device)
        _run("ip", "-n", space, "link", "set", device, "up")
    _run("ip", "-n", name, "route", "add", "default", "via", _HOME_ADDRESS)
    with inside(home):
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")
        _run("iptables", "-w", "-t", "nat", "-A", "POSTROUTING", "-o", WAN_DEVICE, "-j", "MASQUERADE")
        if forwarded_port is not None:
            rule = ("-i", WAN_DEVICE, "-p", "tcp", "--dport", str(forwarded_port))
            _run("iptables", "-w", "-t", "nat", "-A", "PREROUTING", *rule, "-j", "DNAT", "--to", host)


def _set_namespace(descriptor: int) -> None:
    # os.setns comes with Python 3.12.
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    except FileNotFoundError as error:
        raise NotPermitted(f"there is no `{command[0]}` command") from error
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"{' '.join(command)}: {error.stderr.strip() or 'failed'}") from error
