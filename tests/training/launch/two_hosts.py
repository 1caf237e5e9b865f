"""Two hosts on one machine: `python two_hosts.py COMMAND ...` runs COMMAND on each of them, with {node} replaced by 0 and 1.

A host is a network namespace with a name of its own, a loopback and one end of a virtual cable: host0 is 10.77.0.1, host1 is
10.77.0.2. The two reach each other and nothing else. Needs no package, only a kernel that allows it: as root, or through a user
namespace. Both stand until both commands have ended: the end of one must not take the cable, and with it the address, from the
other. Nothing is left behind, however this ends: a namespace goes with its last process.

For a test in Python: `run_on_both` does so with a function. The cable can then be cut.

Exit code: the larger one of both hosts; 77 if the kernel does not allow it, with the reason as the last line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

NOT_ALLOWED = 77
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWUTS, _NEWUSER, _NEWNET = 0x04000000, 0x10000000, 0x40000000
_LINK, _ADDRESS = 16, 20  # RTM_NEWLINK, RTM_NEWADDR
_REQUEST, _CREATE = 0x1 | 0x4, 0x200 | 0x400  # NLM_F_REQUEST | ACK, EXCL | CREATE
_UP = 1  # IFF_UP


def unshare(flags: int) -> None:
    if _LIBC.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel does not allow a namespace ({os.strerror(number)})")


def enter(namespace: int) -> None:
    if _LIBC.setns(namespace, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel does not allow a namespace ({os.strerror(number)})")


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def link(index: int = 0, flags: int = 0, change: int | None = None) -> bytes:
    return struct.pack("=BxHiII", 0, 0, index, flags, flags if change is None else change)


def tell_kernel(kind: int, flags: int, body: bytes) -> None:
    """One message of rtnetlink(7), and its answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 1, 0) + body)
        number = -struct.unpack_from("=i", netlink.recv(65536), 16)[0]
    if number:
        raise OSError(number, f"the kernel does not allow a virtual cable ({os.strerror(number)})")


def lay_cable(peer: int) -> None:
    """A pair of interfaces, both named cable: one here, one in the network namespace `peer`, an open file."""
    name = attribute(3, b"cable\0")  # IFLA_IFNAME
    there = link() + name + attribute(28, struct.pack("=I", peer))  # IFLA_NET_NS_FD
    pair = attribute(1, b"veth\0") + attribute(2, attribute(1, there))  # IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER
    tell_kernel(_LINK, _CREATE, link() + name + attribute(18, pair))  # IFLA_LINKINFO


def plug_in(node: int) -> None:
    for name, address in (("lo", None), ("cable", f"10.77.0.{node + 1}")):
        index = socket.if_nametoindex(name)
        if address:
            ip = socket.inet_aton(address)
            message = struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, index)
            tell_kernel(_ADDRESS, _CREATE, message + attribute(2, ip) + attribute(1, ip))  # IFA_LOCAL, IFA_ADDRESS
        tell_kernel(_LINK, 0, link(index, _UP))


def pull_the_plug(done: str) -> None:
    tell_kernel(_LINK, 0, link(socket.if_nametoindex("cable"), 0, _UP))
    open(done, "w").close()


def become_root() -> None:
    """In a user namespace of our own."""
    user, group = os.getuid(), os.getgid()
    unshare(_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def start_host(node: int, namespace: int, act: Callable[[int], int]) -> None:
    """This process moves into the namespace; its child is the host, and dies with it."""
    enter(namespace)
    unshare(_NEWUTS)
    socket.sethostname(f"host{node}")
    plug_in(node)
    if os.fork():
        return
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    code = 1
    try:
        code = act(node)
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
    finally:  # never back into what it is a copy of
        sys.stderr.flush()
        os._exit(code)


def run_on_both(act: Callable[[int], int], cut: str | None = None) -> int:
    """act: what a host does, given its number; it returns its exit code. cut: as soon as this file exists the cable is unplugged at
    host1; then the file `cut`.done is there."""
    try:
        if os.geteuid() != 0:
            become_root()
        namespaces = []
        for _ in range(2):
            unshare(_NEWNET)
            namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        lay_cable(namespaces[0])
        for node in (0, 1):
            start_host(node, namespaces[node], act)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        return NOT_ALLOWED
    codes: list[int] = []
    while len(codes) < 2:
        if cut is not None and os.path.exists(cut):
            pull_the_plug(f"{cut}.done")
            cut = None
        pid, status = os.waitpid(-1, 0 if cut is None else os.WNOHANG)
        if pid:
            codes.append(abs(os.waitstatus_to_exitcode(status)))
        else:
            time.sleep(0.02)
    return max(codes)


def execute(node: int) -> NoReturn:
    command = [word.replace("{node}", str(node)) for word in sys.argv[1:]]
    os.execvp(command[0], command)


if __name__ == "__main__":
    raise SystemExit(run_on_both(execute))
