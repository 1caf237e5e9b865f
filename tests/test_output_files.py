"""Files that users name: what is there stays what it is; and errors name the file."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ithaca.base.files import write_atomically, write_output
from ithaca.cli.main import main
from ithaca.observe.report import render

from .observe.report import samples


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_output(tmp_path / "page.html", "new")
    finally:
        os.umask(before)
    assert mode(tmp_path / "page.html") == 0o640 and os.listdir(tmp_path) == ["page.html"]


def test_a_file_keeps_mode_owner_and_place_and_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, link = tmp_path / "real" / "page.html", tmp_path / "link.html"
    path.parent.mkdir()
    path.write_text("old")
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 12, 34)
    owner = (path.stat().st_uid, path.stat().st_gid)
    link.symlink_to("real/page.html")
    write_output(link, "new")
    assert link.is_symlink() and os.readlink(link) == "real/page.html"
    assert path.read_text() == "new" and mode(path) == 0o600 and (path.stat().st_uid, path.stat().st_gid) == owner

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_output(path, "half")
    assert path.read_text() == "new" and os.listdir(path.parent) == ["page.html"]
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomically(path, "half")


def test_a_link_to_a_file_that_is_not_there_yet_stays_a_link(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_output(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        write_output(tmp_path / "circle", "text")


def test_a_file_with_two_names_keeps_both(tmp_path: Path):
    (tmp_path / "one").write_text("something longer than the text")
    os.link(tmp_path / "one", tmp_path / "two")
    write_output(tmp_path / "one", "text")
    assert (tmp_path / "two").read_text() == "text" and (tmp_path / "one").samefile(tmp_path / "two")


def test_a_named_pipe_is_written_through_and_a_folder_or_socket_refused(tmp_path: Path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "through")
    reader.join()
    assert found == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name, kind in (("socket", "a socket"), (".", "a folder")):
            with pytest.raises(ValueError, match=f"is {kind}; name a file"):
                write_output(tmp_path / name, "text")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_output(Path("/dev/full"), "text")


@pytest.mark.parametrize("to", ["| cat", "> page; cat page"], ids=["pipe", "file"])
def test_a_page_to_the_standard_output_is_the_page_and_nothing_else(tmp_path: Path, to: str):
    """Also where that is a file: it is not replaced behind the shell's back, and what is said later goes after it."""
    (tmp_path / "plan.json").write_text(json.dumps(samples.plan()))
    command = f"{{ echo before; {sys.executable} -m ithaca report plan.json --out /dev/stdout; echo after; }} {to}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "before\n" + render(plan=samples.plan()) + "after\n"
    assert done.stderr.startswith("wrote /dev/stdout (")


def test_the_page_of_a_run_replaces_a_link_that_somebody_left_there(tmp_path: Path):
    run, prey = samples.write_run(tmp_path / "run", steps=8), tmp_path / "prey"
    prey.write_text("precious")
    (run / "report").mkdir(exist_ok=True)
    page = run / "report/index.html"
    page.symlink_to(prey)
    assert main(["report", str(run)]) == 0
    assert prey.read_text() == "precious" and not page.is_symlink() and page.read_text() == render(run=run)
