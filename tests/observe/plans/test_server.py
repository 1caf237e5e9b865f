"""The server answers this machine's user and nobody else, and what takes long can be ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import psutil
import pytest

from ithaca.cli.main import main
from ithaca.engine.model.shrink import smallest
from ithaca.observe.plans.asking import read
from ithaca.observe.plans.server import Server

from ...waiting import wait_until

SMALL = {"model": "tiny_llama3", "gpus": "1xH100-80GB", "context": "4K"}
LARGE = {"model": "llama3_8b", "gpus": "8xH100-80GB", "context": "1M"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(SMALL) as server:
        yield server


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """path: behind the server's word. headers: with _ for -."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path if path.startswith("/") else parts.path + path, headers=named)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_it_listens_on_loopback_only(server: Server):
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == server.server_address[1]
    }
    assert listening == {"127.0.0.1"}


def test_a_plan_by_its_address(server: Server, tmp_path: Path):
    status, headers, body = ask(server, f"plan?{urlencode(SMALL)}")
    assert status == 200 and json.loads(body)["answer"]["fits"] is True
    assert headers["cache-control"] == "no-store" and headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["server"] == "ithaca" and "access-control-allow-origin" not in headers
    status, headers, body = ask(server, "")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"connect-src 'self'" in body
    status, _, body = ask(server, f"plan?{urlencode({**SMALL, 'context': 'long'})}")
    assert status == 200 and list(json.loads(body)["problems"]) == ["context"]
    status, _, body = ask(server, f"plan?{urlencode({**SMALL, 'model': '/nowhere/at/all'})}")
    assert status == 200 and "no folder with a config.json" in json.loads(body)["problems"][""]
    smallest("exaone4").save_pretrained(tmp_path)
    _, _, body = ask(server, f"plan?{urlencode({**SMALL, 'model': str(tmp_path)})}")
    assert json.loads(body) == {"counting": True}


@pytest.mark.parametrize(
    "path, headers",
    [
        ("/", {}),
        ("/wrong/", {}),
        ("/wrong/plan?model=llama3_8b", {}),
        ("/%C3%A4/plan", {}),
        ("plan", {"Host": "evil.example:80"}),
        ("", {"Host": "evil.example"}),
        ("plan", {"Host": ""}),
        ("plan", {"Origin": "http://evil.example"}),
        ("plan", {"Origin": "null"}),
        ("more", {"Sec_Fetch_Site": "cross-site"}),
        ("file", {"Sec_Fetch_Site": "same-site"}),
    ],
)
def test_others_are_refused(server: Server, path: str, headers: dict[str, str]):
    status, _, body = ask(server, path, **headers)
    assert status == 403 and b"fits" not in body


def test_whoever_follows_a_link_sees_the_page_and_only_reads(server: Server):
    assert ask(server, "", Sec_Fetch_Site="cross-site")[0] == 200  # a link in a mail
    assert ask(server, "plan", Host=f"localhost:{server.server_address[1]}")[0] == 200  # by way of ssh
    assert ask(server, "etc/passwd")[0] == 404 and ask(server, "../../etc/passwd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "plan", method)[0] == 501


def test_what_takes_longer_comes_piece_by_piece_and_is_remembered(server: Server):
    query = urlencode({**SMALL, "place": "first"})
    pieces = [json.loads(line) for line in ask(server, f"more?{query}")[2].splitlines() if line]
    assert {piece["part"] for piece in pieces} == {"ladder", "longest", "grid", "cell"}
    assert server.slow.known(read(SMALL)) == pieces
    status, headers, page = ask(server, f"file?{urlencode(SMALL)}")
    assert status == 200 and headers["content-disposition"] == 'attachment; filename="plan.html"'
    assert b"connect-src" not in page and b'"part":"ladder"' in page
    assert json.loads(ask(server, "more?model=")[2])["part"] == "trouble"
    assert ask(server, f"file?{urlencode({**SMALL, 'gpus': 'none'})}")[0] == 422


def children() -> set[int]:
    found = set()
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            found |= {each.pid} if each.name() == "ithaca plan" else set()
    return found


def test_a_new_question_ends_the_one_before(server: Server):
    first = server.slow.ask("page", read(LARGE))
    assert next(piece for piece in first if piece)["part"] == "ladder"
    before = children()
    second = server.slow.ask("page", read({**LARGE, "context": "512K"}))
    assert next(piece for piece in second if piece)["part"] == "ladder"
    assert not any(piece and piece["part"] == "trouble" for piece in first), "it was ended, and says nothing of it"
    assert len(before) == 1 and not before & children() and not server.slow.known(read(LARGE))
    second.close()  # as when the page has gone
    wait_until(lambda: not children())


def test_whoever_hangs_up_ends_what_was_asked(server: Server):
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as line:
        query = urlencode({**LARGE, "context": "2M", "place": "gone"})
        line.sendall(f"GET {parts.path}more?{query} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        assert line.recv(15) == b"HTTP/1.0 200 OK"
        wait_until(children)
    wait_until(lambda: not children())


def test_a_worker_that_dies_is_said(server: Server):
    asking = server.slow.ask("dies", read({**LARGE, "context": "768K"}))
    assert next(piece for piece in asking if piece)["part"] == "ladder"
    (worker,) = children()
    os.kill(worker, signal.SIGKILL)
    assert [piece for piece in asking if piece][-1] == {
        "part": "trouble", "value": "the planner's process ended: killed by SIGKILL",
    }  # fmt: skip


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_is_how_it_ends(number: int, code: int, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "ithaca",
        "plan",
        "--web",
        "--no-open",
        "llama32_1b",
        "--context",
        "64K",
        "--stack.tile",
        "4K",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    with urlopen(url) as page:
        first = json.loads(page.read().decode().split('id="data">')[1].split("</script>")[0])["first"]
    assert (
        first["model"] == "llama32_1b" and first["context"] == "64K" and first["stack"] == "tile=4K" and first["gpus"]
    )
    others = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and (err == "" if code == 0 else "stopped by SIGTERM" in err)
    wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in others))


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "of which model?"),
        (["llama3_8b", "--context", "1M"], "on which GPUs"),
        (["llama3_8b", "--gpus", "H100", "--context", "1M", "--port", "80"], "give --web too"),
        (["--web", "--json"], "--json: not with --web"),
        (["--web", "--port", "0"], "--port 0 must be at least 1"),
    ],
)
def test_what_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2 and said in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(server: Server, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--web", "--port", str(server.server_address[1])]) == 2
    assert "cannot be used (Address already in use); name another" in capsys.readouterr().err
