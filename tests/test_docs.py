"""The documentation: links lead somewhere, pages that messages name are there, and commands in the pages work.

Here: what costs nothing. ITHACA_DOCS=long (`make docs`) also runs the commands and programs of the README, the tutorial and the
guides, a page in a folder of its own, builds the site and a wheel. A block that cannot run here says so in a comment before it,
`<!-- not run: needs 8 GPUs -->`; these are counted and listed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

import ithaca
from ithaca.cli import docs
from ithaca.cli.main import build_parser, main
from ithaca.config import split_overrides
from ithaca.config.suggest import paths

ROOT = Path(__file__).parent.parent
LONG = os.environ.get("ITHACA_DOCS") == "long"
long = pytest.mark.skipif(not LONG, reason="make docs")
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*OUTSIDE, *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("benchmarks/**/*.md"))]
USERS = [ROOT / "README.md", *docs.pages().values()]
TYPED = [
    ROOT / "README.md",
    *(path for path in docs.pages().values() if path.parent.name in ("start", "guides", "help")),
]
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(ithaca|pip|make|python|torchrun|srun|sbatch|cat|ls|cp|mkdir)\b")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    reason: str | None  # why it is not run
    text: str

    @property
    def transcript(self) -> bool:
        return self.text.startswith("$ ")

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(r"(?:<!-- not run: ([^>]+?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for found in pattern.finditer(text):
        language = found[2]
        if not language and (found[3].startswith("$ ") or COMMAND.match(found[3])):
            language = "sh"
        yield Block(page, text.count("\n", 0, found.start(2)) + 1, language, found[1], found[3])


BLOCKS = [block for page in USERS for block in blocks(page)]


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Each command of a shell block, continued lines as one, and the line behind it."""
    lines = re.sub(
        r" \\\n +", " ", re.sub(r"<<'EOF'\n.*?^EOF$", "", block.text, flags=re.DOTALL | re.MULTILINE)
    ).splitlines()
    for number, line in enumerate(lines):
        if not block.transcript or line.startswith("$ "):
            following = lines[number + 1] if number + 1 < len(lines) else ""
            yield line.removeprefix("$ "), following


# -- links --------------------------------------------------------------------------------------------------------------------


def headings(page: Path) -> list[str]:
    plain = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found) for found in re.findall(r"^#+ (.+)$", plain, re.MULTILINE)]


def on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def on_the_site(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def broken(page: Path, target: str) -> str | None:
    name, _, anchor = target.partition("#")
    there = (page.parent / name).resolve() if name else page
    if not there.exists():
        return f"{page.relative_to(ROOT)}: {target} is not there"
    kinds = (on_github,) if there in OUTSIDE else (on_github, on_the_site)
    if anchor and not all(anchor in map(kind, headings(there)) for kind in kinds):
        return f"{page.relative_to(ROOT)}: {target} has no such heading"
    return None


def test_links_lead_somewhere():
    targets = [
        (page, target)
        for page in PAGES
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        )
        if not target.startswith(("http://", "https://"))
    ]
    assert len(targets) > 200
    assert not [problem for page, target in targets if (problem := broken(page, target))]


def test_a_broken_link_would_be_noticed():
    page = ROOT / "docs" / "index.md"
    assert broken(page, "start/nowhere.md") and broken(page, "start/tutorial.md#nowhere")
    assert broken(page, "start/tutorial.md#6-train") is None


# -- pages --------------------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    def walk(nav: Any) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
            yield from walk(each)

    wanted = list(walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    folders = [each for each in wanted if each.endswith("/")]
    there = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert len(wanted) == len(set(wanted)) and folders == ["developer/results/", "decisions/"]
    named = set(wanted) - set(folders) - {"developer/contributing.md", "help/changelog.md"}  # of docs/hooks.py
    assert named == {page for page in there if not page.startswith("decisions/")}


def test_names_of_pages_are_unique_and_their_titles_there():
    found = [path for room in docs.ROOMS for path in docs.folder().glob(f"{room}/**/*.md")]
    assert len(docs.pages()) == len(found) + 1 > 40
    assert all(docs.title(path) for path in docs.pages().values())
    assert {path.name for path in docs.folder().iterdir() if path.is_dir()} == {
        *docs.ROOMS,
        "developer",
        "decisions",
        "images",
    }


def test_pages_for_users_are_no_laboratory_notes():
    for page in docs.pages().values():
        assert not re.search(r"\bcommit [0-9a-f]{7}", page.read_text(encoding="utf-8")), page


def texts_for_users(path: Path) -> Iterator[str]:
    """Strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare
    )  # fmt: skip


def test_messages_name_pages_that_are_there():
    sources = [path for path in sorted((ROOT / "src").rglob("*.py")) if "docs" in path.read_text(encoding="utf-8")]
    named = [
        name
        for path in sources
        for text in texts_for_users(path)
        for name in re.findall(r"ithaca docs ([a-z_]+)", text)
    ]
    assert len(named) > 20 and all(docs.find(name) for name in named)
    recipes = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.yaml"))
    assert all(docs.find(name) for name in re.findall(r"ithaca docs ([a-z_]+)", recipes)) and "docs/" not in recipes
    head = ROOT / "src/ithaca/config/reference.py"  # says how the page is made, in a comment for those who edit it
    paths = [
        path
        for path in sources
        if path != head
        for text in texts_for_users(path)
        if re.search(r"\bdocs/\w+\.md|\bdocs/\w+/", text)
    ]
    assert not paths, "an installed user has no docs/; say: ithaca docs PAGE"


def test_paths_of_pages_in_comments_are_there():
    files = [
        *(path for room in ("src", "tests", "examples", "benchmarks") for path in (ROOT / room).rglob("*.py")),
        ROOT / "Makefile",
    ]
    found = {name for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))}
    assert len(found) > 10 and not [name for name in found if not (ROOT / name).exists()]


# -- the verb -----------------------------------------------------------------------------------------------------------------


def test_ithaca_docs(capsys: pytest.CaptureFixture[str]):
    assert main(["docs"]) == 0
    assert "\nguides\n" in (said := capsys.readouterr().out) and "  tutorial  " in said
    assert main(["docs", "guides/data.md"]) == main(["docs", "data"]) == 0
    once = capsys.readouterr().out
    assert once.count("# Data: from files") == 2 and "<!--" not in once
    assert main(["docs", "api"]) == 0 and "\n    python -m pydoc ithaca.stack.Stack\n" in capsys.readouterr().out
    assert main(["docs", "tutorial", "--path"]) == 0
    assert Path(capsys.readouterr().out.strip()) == docs.folder() / "start" / "tutorial.md"
    assert main(["docs", "troubleshoting"]) == 2 and "did you mean troubleshooting?" in capsys.readouterr().err
    assert main(["docs", "start/data"]) == main(["docs", "../README"]) == main(["docs", "data", "--list"]) == 2


def test_every_verb_is_on_the_page_of_commands():
    (verbs,) = (action for action in build_parser()._actions if action.dest == "verb")
    page = (docs.folder() / "reference/commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([a-z]+)(?: [a-z]+)?`(?=[^|\n]*\|)", page)) >= set(verbs.choices or ())


# -- commands -----------------------------------------------------------------------------------------------------------------


def words_of(command: str) -> list[str] | None:
    """Arguments of an ithaca command that is whole."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if (
        not words
        or words[0] != "ithaca"
        or any(word.startswith(("[", "...")) or word.endswith("...") for word in words)
    ):
        return None
    ends = [at for at, word in enumerate(words) if word in ("|", ">", "&&")]
    return words[1 : min(ends, default=len(words))]


def test_commands_of_the_pages_are_understood(capsys: pytest.CaptureFixture[str]):
    """Also of those that need eight GPUs: verbs, options and settings are there."""
    parser, settings, seen = build_parser(), {path.replace("[]", "") for path in paths()}, 0
    for block in BLOCKS:
        if block.language not in ("sh", "bash", "console"):
            continue
        for command, _ in commands(block):
            words = words_of(command)
            if words is None or not words:
                continue
            seen += 1
            rest, overrides = split_overrides(words)
            try:
                parser.parse_args(rest)
            except SystemExit as end:
                assert end.code == 0, f"{block.where}: {command}\n{capsys.readouterr().err}"
            known = [override.partition("=")[0] for override in overrides]
            assert all(name in settings or name.partition(".")[0] == "stack" for name in known), (
                f"{block.where}: {known}"
            )
    assert seen > 80


def test_the_plan_on_the_first_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]):
    first = blocks(ROOT / "README.md")
    asked = next(words_of(command) for block in first for command, _ in commands(block) if " plan " in command)
    shown = next(first).text.replace("  ...\n", "").splitlines()
    assert asked is not None and main(asked) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and [line for line in shown if not any(p.startswith(line) for p in printed)] == []


def test_blocks_with_commands_say_so():
    """In pages whose commands are run, a block without a language is output, and none with commands escapes."""
    untyped = [
        f"{page.relative_to(ROOT)}: {found.strip()}"
        for page in TYPED
        if page not in OUTSIDE
        for found in re.findall(r"^```\n(.+)$(?=[^`]*?^```)", page.read_text(encoding="utf-8"), re.MULTILINE)
        if found.startswith("$ ") or re.match(COMMAND.pattern + r" [\w-]", found)
    ]
    assert not untyped
    assert all(block.reason is None or len(block.reason) > 8 for block in BLOCKS)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody who has installed ithaca, without a network."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in (("ithaca", "-m ithaca "), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (folder / name).chmod(0o755)
    source = str(Path(ithaca.__file__).parents[1])
    away = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {**os.environ, **away, "PATH": f"{folder}:{os.environ['PATH']}"}


INSTALLS = re.compile(r"pip |make |git |torchrun |srun |sbatch |hf ")


def run(block: Block, folder: Path, environ: dict[str, str]) -> str | None:
    """-> why not all of it was run"""

    def done(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL
        )

    if block.language == "python":
        if (
            block.page in OUTSIDE
        ):  # a fragment may stand there: that it is Python, and its names ours, is all that can be asked
            names = re.findall(r"\bithaca\.([A-Za-z]\w*)(?=\()", block.text)
            assert compile(block.text, block.where, "exec") and all(hasattr(ithaca, name) for name in names), (
                block.where
            )
            return "a fragment: compiled, names looked up"
        result = done([sys.executable, "-c", block.text])
        assert result.returncode == 0, f"{block.where}\n{result.stdout}\n{result.stderr}"
        return None
    if block.page not in OUTSIDE and not block.transcript:
        result = done(["bash", "-euo", "pipefail", "-c", block.text])
        assert result.returncode == 0, f"{block.where}\n{result.stdout}\n{result.stderr}"
        return None
    left_out = []
    for command, shown in commands(block):
        name = command.split("#")[0].strip()
        if INSTALLS.match(command):
            left_out.append(f"`{name}` installs, or has a target or launcher of its own")
            continue
        result = done(["bash", "-c", command])
        for lacking in ("no GPU here", "HF_HUB_OFFLINE forbids"):
            if result.returncode and lacking in result.stderr:
                return "; ".join([*left_out, f"from `{name}` on: {lacking}"])
        wanted = 2 if block.transcript and re.match(r"ithaca \w+: ", shown) else 0  # a mistake that is shown on purpose
        assert result.returncode == wanted, f"{block.where}: {command}\n{result.stdout}\n{result.stderr}"
        assert not wanted or shown in result.stderr, f"{block.where}: {command}\n{result.stderr}"
    return "; ".join(left_out) or None


@long
@pytest.mark.timeout(1800)  # of a busy machine; idle, the longest takes a minute and a half
@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.stem)
def test_commands_run(page: Path, machine: dict[str, str], tmp_path: Path):
    found = [block for block in blocks(page) if block.language in ("sh", "bash", "console", "python")]
    ran = 0
    for block in found:
        reason = block.reason or run(block, tmp_path, machine)
        ran += reason is None
        if reason:
            print(f"\n{block.where}: not run: {reason}", end="")
    print(f"\n{page.relative_to(ROOT)}: {ran} of {len(found)} blocks run")
    assert ran >= {"tutorial": 10, "install": 2, "README": 1}.get(page.stem, 0)
    if page.stem == "tutorial":
        assert (tmp_path / "exported" / "model.safetensors").is_file()


@long
def test_the_site():
    """As `make docs` has just built it: nothing in it is fetched from elsewhere, and docstrings are there."""
    site = ROOT / "site"
    newest = max(path.stat().st_mtime for path in (*ROOT.glob("docs/**/*.*"), ROOT / "mkdocs.yml"))
    assert (site / "index.html").stat().st_mtime > newest, "site/ is older than docs/: mkdocs build --strict"
    built = list(site.rglob("*.html"))
    assert len(built) > 80
    fetched = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    for page in built:
        assert not fetched.search(page.read_text(encoding="utf-8")), page
    api = (site / "reference/api.html").read_text(encoding="utf-8")
    names = ("ithaca.stack.Stack", "ithaca.engine.run.Run.loss", "ithaca.planner.search.plan")
    assert all(f'id="{name}"' in api for name in names)


@long
def test_the_pages_travel_in_the_wheel(tmp_path: Path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(tmp_path / "installed")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    for words in (["docs", "tutorial", "--path"], ["docs", "--list"]):
        said = subprocess.run(
            [sys.executable, "-m", "ithaca", *words],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "installed/ithaca/docs/start/tutorial.md" in said or all(f"  {name} " in said for name in docs.pages())
    assert not [name for name in ZipFile(wheel).namelist() if "docs/developer" in name or "docs/decisions" in name]
