"""Did the system kill a process because memory ran out? It leaves no message behind, only SIGKILL, but it counts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def oom_kills(own: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> int:
    """How often it has in our control group: a container, a Slurm job, a login session. 0 where the count cannot be read."""
    for path in _counters(own, groups):
        with suppress(OSError, UnicodeDecodeError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _counters(own: Path, groups: Path) -> list[Path]:
    """Files that may hold the count: of this process's group, version 2 or 1; else of the root, as a container sees its own."""
    found = []
    with suppress(OSError, UnicodeDecodeError):
        for line in own.read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                found.append(groups / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    return [*found, groups / "memory.events", groups / "memory" / "memory.oom_control"]
