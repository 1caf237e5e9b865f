"""Compiled kernels are loaded as code: they are kept where nobody else can write, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from ithaca.engine.attention.compiled import ENABLED, FOLDER, keep_compiled

HOPPER = (9, 0)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache is new. Folders on the way to it are pytest's: the user's own."""
    return {"HOME": str(tmp_path)}


def test_a_folder_of_the_users_own_for_each_kind_of_gpu(home: dict[str, str], tmp_path: Path):
    before = os.umask(0o002)  # where every user has a group, files are open to it
    (tmp_path / ".cache").mkdir(mode=0o755)
    try:
        assert keep_compiled(HOPPER, home) is None
    finally:
        os.umask(before)
    folder = Path(home[FOLDER])
    assert home[ENABLED] == "1" and folder == tmp_path.resolve() / ".cache/ithaca/flash-attention-4/sm90"
    assert [each.stat().st_mode & 0o777 for each in (folder, *folder.parents[:2])] == [0o700] * 3
    again, other = {"HOME": str(tmp_path)}, {"HOME": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "x")}
    assert keep_compiled(HOPPER, again) is None and again[FOLDER] == str(folder)
    assert keep_compiled((10, 0), other) is None and other[FOLDER].endswith("x/ithaca/flash-attention-4/sm100")


@pytest.mark.parametrize("said", ["0", "1"])
def test_who_has_decided_is_left_alone(home: dict[str, str], tmp_path: Path, said: str):
    home[ENABLED] = said
    assert keep_compiled(HOPPER, home) is None and home == {"HOME": str(tmp_path), ENABLED: said}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", [".cache/ithaca/flash-attention-4/sm90", ".cache/ithaca", "."])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_not_where_others_can_write(home: dict[str, str], tmp_path: Path, where: str, mode: int):
    """A folder above counts too: whoever can write there can put another one in its place."""
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    (tmp_path / where).chmod(mode)
    assert keep_compiled(HOPPER, home) == f"others can write to {(tmp_path / where).resolve()}"
    assert home == {"HOME": str(tmp_path)}


def test_not_where_somebody_else_has_made_the_folder(home: dict[str, str], tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = tmp_path / ".cache/ithaca"
    folder.mkdir(parents=True)
    os.chown(folder, 1234, 1234)
    assert keep_compiled(HOPPER, home) == f"others can write to {folder.resolve()}" and ENABLED not in home


def test_not_through_a_link_that_was_laid_there(home: dict[str, str], tmp_path: Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/ithaca").symlink_to(theirs)
    assert keep_compiled(HOPPER, home) == f"others can write to {theirs.resolve()}" and ENABLED not in home


def test_without_a_home_or_locks_it_compiles_every_time(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / ".cache").write_text("a file")
    why = keep_compiled(HOPPER, home)
    assert why is not None and "File exists" in why and ENABLED not in home
    (tmp_path / ".cache").unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)  # as a network file system that is mounted without them does
    why = keep_compiled(HOPPER, home)
    assert why is not None and why.endswith("has no locks (No locks available)") and ENABLED not in home
