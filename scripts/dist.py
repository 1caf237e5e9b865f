"""`make dist`: the wheel and the sdist of a release, checked, then installed and tried where a user would.

Tests run from the checkout, and a checkout forgives: a file that was never packed is there, a dependency that is not declared is
installed for something else. So the wheel goes into an environment of its own outside this folder, with the dependencies it
declares and nothing more, and does there what a user does first.

    python scripts/dist.py              dist/ithaca-VERSION.tar.gz and dist/ithaca-VERSION-py3-none-any.whl
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # hatchling brings it

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TINY = ["--recipe", "tiny_cpu", "--launch.cpu", "2", "--stack.ring", "1", "--data.context", "256", "--train.steps", "3"]
LOADS = """
import importlib.util, sys
from transformers import AutoModelForCausalLM
import ithaca
model = AutoModelForCausalLM.from_pretrained("exported")
extras = [name for name in ("peft", "datasets", "pyarrow", "accelerate") if importlib.util.find_spec(name)]
assert not extras, f"{extras} came along, so nothing shows that the core runs without them"
print(ithaca.__file__, sum(each.numel() for each in model.parameters()))
"""


def main() -> int:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ithaca-dist-") as name:
        folder = Path(name)
        with step("sdist, and a wheel of it"):
            sdist, wheel = build(folder)
        version = wheel.name.split("-")[1]
        with step(f"what is in them: {version}"):
            check_contents(sdist, wheel, version)
            check_tag(version)
        with step("an environment of its own"):
            programs = install(wheel, folder / "environment")
        attempt(programs, folder / "elsewhere", version)
    print(f"{sdist.relative_to(ROOT)} and {wheel.relative_to(ROOT)} are good; {time.perf_counter() - began:.0f} s")
    return 0


@contextmanager
def step(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"ok  {time.perf_counter() - began:5.1f} s  {what}", flush=True)


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel is made from the sdist, so what the sdist lacks is missing; the tree's must be the same, byte for byte."""
    for old in DIST.glob("ithaca-*"):
        old.unlink()
    # not isolated: `make setup` has built this package in an isolated environment, with the same pins
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT)
    (sdist,), (wheel,), (of_tree,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl"), folder.glob("*.whl")
    if digest(wheel) != digest(of_tree):
        fail("the wheel that the sdist gives is not the wheel of this tree", differences(wheel, of_tree))
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(one: Path, other: Path) -> list[str]:
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        sums = [{entry.filename: entry.CRC for entry in each.infolist()} for each in (a, b)]
    return sorted(name for name in sums[0].keys() | sums[1].keys() if sums[0].get(name) != sums[1].get(name))


def check_contents(sdist: Path, wheel: Path, version: str) -> None:
    """Nothing that git does not know, nothing missing, no tests in the wheel."""
    known, forced = committed(), forced_files()
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        metadata = archive.read(f"ithaca-{version}.dist-info/METADATA").decode()
    about = {name for name in packed if name.startswith(f"ithaca-{version}.dist-info/")}
    wanted = {name.removeprefix("src/") for name in known if name.startswith("src/ithaca/")}
    made = {name for name in packed for target in forced.values() if name == target or name.startswith(target + "/")}
    if extra := packed - about - wanted - made:
        fail("the wheel holds files that git does not know; add them, or remove them", extra)
    if missing := wanted - packed:
        fail("the wheel lacks", missing)
    kinds = {Path(name).suffix for name in packed - about}
    if lost := {".py", ".yaml", ".js", ".css", ".html", ".jinja"} - kinds:
        fail("the wheel has no file of these kinds, which the package reads when it runs", lost)
    if f"ithaca-{version}.dist-info/licenses/LICENSE" not in about:
        fail("the wheel has no license", about)
    for line in (f"Version: {version}", "License-Expression: Apache-2.0", "Requires-Python: >=3.10"):
        if f"\n{line}\n" not in metadata:
            fail(f"METADATA does not say '{line}'")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    made = {name for name in inside for source in forced if name == source or name.startswith(source + "/")}
    if extra := inside - known - made:
        fail("the sdist holds files that git does not know; add them, or remove them", extra)
    needed = {name for name in known if name.startswith(("src/", "tests/", "docs/", "examples/"))}
    if missing := ({"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} | needed) - inside:
        fail("the sdist lacks", missing)


def committed() -> set[str]:
    # a checkout may belong to somebody else than who builds (containers)
    names = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", cwd=ROOT).split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


def forced_files() -> dict[str, str]:
    """Files that are made and then packed: their place in the tree, and in the wheel."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {source.strip("/"): target.strip("/") for source, target in table.get("force-include", {}).items()}


def check_tag(version: str) -> None:
    """A commit with a release's tag is that release."""
    tags = run("git", "-c", f"safe.directory={ROOT}", "tag", "--points-at", "HEAD", "v*", cwd=ROOT).split()
    if tags and tags != [f"v{version}"]:
        fail(f"this commit has the tag {' '.join(tags)}, but the version in src/ithaca/__init__.py is {version}")


def install(wheel: Path, environment: Path) -> Path:
    """The folder of its programs. With the dependencies that the wheel declares, in the versions that are tested."""
    venv.create(environment, symlinks=True)  # without pip: ours installs into it, which saves half a minute
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    run(*pip, "check")
    return environment / "bin"


def attempt(programs: Path, folder: Path, version: str) -> None:
    """What a user does first, in a folder and with a home that know nothing of this checkout."""
    (folder / "home").mkdir(parents=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    clean = {**kept, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def ithaca(*words: str, says: str) -> None:
        with step("ithaca " + " ".join(words)):
            said = run(programs / "ithaca", *words, cwd=folder, env=clean)
            if says not in said:
                fail(f"'ithaca {' '.join(words)}' does not say '{says}'", said.splitlines())

    ithaca("--version", says=f"ithaca {version} (")
    ithaca("plan", "llama3_8b", "--gpus", "8xH100-80GB", "--context", "1M", says=": fits, ")
    ithaca("recipes", "ls", says="tiny_cpu")
    ithaca("verify", "llama3", "--world", "1", "--device", "cpu", "--length", "257", says="all within their limits")
    ithaca("train", *TINY, "--run.folder", "run", says="finished 3 steps; checkpoint: checkpoints/step-3")
    ithaca("report", "run", says="wrote run/report/index.html")
    ithaca("export", "run", "exported", says="wrote LlamaForCausalLM of step 3")
    with step("transformers loads what was exported"):
        where, _, parameters = run(programs / "python", "-c", LOADS, cwd=folder, env=clean).strip().rpartition(" ")
        if not Path(where).is_relative_to(programs.parent) or int(parameters) < 1000:
            fail(f"the ithaca that ran is {where}, with a model of {parameters} parameters")


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        fail(f"{' '.join(words)} ended with {done.returncode}", (done.stdout + done.stderr).splitlines()[-40:])
    return done.stdout


def fail(what: str, lines: Iterable[str] = ()) -> NoReturn:
    shown = sorted(lines) if isinstance(lines, set) else list(lines)
    raise SystemExit("\n  ".join([f"dist: {what}", *shown[:40]]))


if __name__ == "__main__":
    raise SystemExit(main())
