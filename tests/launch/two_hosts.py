"""Two hosts on one machine: `python two_hosts.py COMMAND ...` runs COMMAND on each of them, with {node} replaced by 0 and 1.

A host is a network namespace with a name of its own, a loopback and one end of a virtual cable: host0 is 10.77.0.1, host1 is
10.77.0.2. The two reach each other and nothing else. Needs no package, only a kernel that allows it: as root, or through a user
namespace. A namespace ends with its last process, so nothing is left behind, however this ends.

With TWO_HOSTS_CUT=FILE in the environment the cable is unplugged at host1 for as long as FILE exists.

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
    """A pair of interfaces, both named cable: one here, one in the namespace of process `peer`."""
    name = attribute(3, b"cable\0")  # IFLA_IFNAME
    there = link() + name + attribute(19, struct.pack("=I", peer))  # IFLA_NET_NS_PID
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


def keep_watch(cut: str) -> None:
    """A process of the host that pulls the plug and puts it back."""
    if os.fork():
        return
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)
    index, plugged = socket.if_nametoindex("cable"), True
    while os.getppid() != 1:
        if os.path.exists(cut) == plugged:
            plugged = not plugged
            tell_kernel(_LINK, 0, link(index, _UP if plugged else 0, _UP))
        time.sleep(0.05)
    os._exit(0)


def become_host(node: int, command: list[str], ready: list[tuple[int, int]], laid: tuple[int, int], peer: int) -> None:
    _LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no host outlives this script
    try:
        unshare(_NEWNET | _NEWUTS)
        socket.sethostname(f"host{node}")
        if node == 0:
            os.read(ready[1][0], 1)
            lay_cable(peer)
            os.write(laid[1], b"!")
        else:
            os.write(ready[1][1], b"!")
            os.close(laid[1])
            if not os.read(laid[0], 1):
                os._exit(NOT_ALLOWED)  # the other one says why
        plug_in(node)
        if node == 1 and "TWO_HOSTS_CUT" in os.environ:
            keep_watch(os.environ["TWO_HOSTS_CUT"])
    except OSError as error:
        print(error.strerror, file=sys.stderr, flush=True)
        os._exit(NOT_ALLOWED)
    os.execvp(command[0], [word.replace("{node}", str(node)) for word in command])


def main(command: list[str]) -> int:
    if os.geteuid() != 0:
        user, group = os.getuid(), os.getgid()
        try:
            unshare(_NEWUSER)
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        except OSError as error:
            print(error.strerror, file=sys.stderr)
            return NOT_ALLOWED
    ready, laid = [os.pipe(), os.pipe()], os.pipe()
    hosts: list[int] = []
    for node in (1, 0):  # host 0 lays the cable to host 1, so it must know its process
        pid = os.fork()
        if pid == 0:
            become_host(node, command, ready, laid, hosts[0] if hosts else 0)
        hosts.append(pid)
    os.close(laid[1])
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in hosts]
    return max(abs(code) for code in codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
