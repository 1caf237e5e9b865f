"""A small Hub on the loopback: the routes of huggingface.co that fetching and pushing need, over repositories in memory."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from ithaca.base.hub import PINS

TOKEN = "hf_of_the_tests"


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        return name


@dataclass
class Hub:
    address: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)  # models/owner/name, datasets/owner/name
    blobs: dict[str, bytes] = field(default_factory=dict)  # uploads, by SHA-256
    asked: list[str] = field(default_factory=list)
    full: bool = False  # takes no uploads

    def add(self, name: str, files: dict[str, bytes] | Path, branch: str = "main") -> str:
        if isinstance(files, Path):
            found = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        return self.repos.setdefault(name, Repo()).commit(files, branch)

    def files(self, name: str) -> dict[str, bytes]:
        repo = self.repos[name]
        return repo.commits[repo.branches["main"]]

    def fetched(self) -> list[str]:
        """Files that were sent."""
        return [
            line.rpartition("/resolve/")[2].partition("/")[2]
            for line in self.asked
            if line.startswith("GET") and "/resolve/" in line
        ]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point(monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path) -> None:
    """Let huggingface_hub, which has read its variables, ask this one and keep what comes in a folder of the test."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv(PINS, "{}")


def variables(hub: Hub, home: Path) -> dict[str, str]:
    """The same for another process."""
    return {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return self._json({"name": "me", "auth": {}}) if known else self._json({"error": "who?"}, 401)
        if path.startswith("/api/") and path.count("/") < 4:
            return self._json({"error": "not found"}, 404)
        if path.startswith("/api/"):
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
            repo, what, revision = f"{kind}/{owner}/{name}", rest[0] if rest else "", "/".join(rest[1:]) or "main"
        else:
            path = path.removeprefix("/") if path.startswith("/datasets/") else "models" + path
            kind, owner, name, what, revision, *rest = path.split("/")
            repo = f"{kind}/{owner}/{name}"
        about = self.hub.repos.get(repo)
        if about is None:
            return self._json({"error": "not found"}, 404, "RepoNotFound")
        commit = about.branches.get(revision, revision)
        if commit not in about.commits:
            return self._json({"error": "no such revision"}, 404, "RevisionNotFound")
        files = about.commits[commit]
        if what == "tree":
            return self._json(
                [{"type": "file", "path": path, "size": len(data), "oid": _oid(data)} for path, data in files.items()]
            )
        if what in ("", "revision"):
            siblings = [{"rfilename": path, "size": len(data), "blobId": _oid(data)} for path, data in files.items()]
            return self._json(
                {"id": repo.partition("/")[2], "sha": commit, "siblings": siblings, "private": about.private}
            )
        if about.gated:
            return self._json({"error": "gated"}, 403, "GatedRepo")
        if (data := files.get("/".join(rest))) is None:
            return self._json({"error": "no such file"}, 404, "EntryNotFound")
        self._send(data, 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        body, path = self.rfile.read(int(self.headers.get("Content-Length", 0))), urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "who?"}, 401)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            if owner != "me":
                return self._json({"error": "not yours"}, 403)
            name = f"models/{owner}/{asked['name']}"
            if name in self.hub.repos:
                return self._json({"error": "there already", "url": f"{self.hub.address}/{name[7:]}"}, 409)
            self.hub.repos[name] = Repo(private=asked.get("visibility") == "private" or asked.get("private") is True)
            self.hub.repos[name].commit({".gitattributes": b""})
            return self._json({"url": f"{self.hub.address}/{owner}/{asked['name']}"})
        if path.endswith("/info/lfs/objects/batch"):
            where = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": where})
        kind, owner, name, what, _ = path.removeprefix("/api/").split("/")
        repo = self.hub.repos[f"{kind}/{owner}/{name}"]
        if what == "preupload":
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"  # noqa: E731
            files = [
                {"path": each["path"], "uploadMode": mode(each["path"]), "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        assert what == "commit", path
        files = dict(repo.commits[repo.branches["main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = repo.commit(files)
        self._json(
            {"commitUrl": f"{self.hub.address}/{owner}/{name}/commit/{commit}", "commitOid": commit, "success": True}
        )

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.hub.full:
            return self._json({"error": "quota"}, 413)
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.blobs[oid] = data
        self._json({})

    def _json(self, value: Any, status: int = 200, code: str | None = None) -> None:
        headers = {"Content-Type": "application/json", **({"X-Error-Code": code} if code else {})}
        self._send(json.dumps(value).encode(), status, headers)

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
