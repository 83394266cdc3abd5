"""`disagg dashboard`: over HTTP to a fake Grafana, and as files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.dashboards import grafana, provision
from disagg.errors import ConfigError, DisaggError

DOCKER = Path(__file__).parents[3] / "docker"


class Grafana(ThreadingHTTPServer):
    """The path of Grafana's API that the command uses, with its checks; stores the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.sent: list[dict[str, Any]] = []
        self.problem: tuple[int, str] | None = None


class _Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/grafana/api/dashboards/db":
            self._answer(404, {"message": "Not found"})
        elif self.server.problem:
            status, message = self.server.problem
            self._answer(status, {"message": message})
        elif self.headers["authorization"] != "Bearer of-an-editor":
            self._answer(401, {"message": "Unauthorized"})
        else:
            self.server.sent.append(body)
            uid = body["dashboard"]["uid"]
            self._answer(200, {"status": "success", "uid": uid, "url": f"/grafana/d/{uid}/disagg"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grafana]:
    monkeypatch.setenv("TOKEN", "of-an-editor")
    server = Grafana()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_send(server: Grafana) -> None:
    page = provision.send(f"{server.url}/grafana/", "TOKEN", None)
    assert page == f"{server.url}/grafana/d/disagg/disagg"
    (sent,) = server.sent
    assert sent == {"dashboard": json.loads(grafana.FILE.read_text("utf-8")), "overwrite": True}


def test_a_refusal_by_grafana_says_what_to_do(
    server: Grafana, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/grafana"
    with pytest.raises(DisaggError, match=r"401: the token .* --token-env"):
        provision.send(url, None, None)
    with pytest.raises(DisaggError, match="404: no Grafana API at this URL"):
        provision.send(server.url, "TOKEN", None)
    for status, words in ((403, "the role Editor"), (412, "change its files"), (500, "no disk")):
        server.problem = (status, "no disk")
        with pytest.raises(DisaggError, match=f"{status}: .*{words}"):
            provision.send(url, "TOKEN", None)
    server.problem = (200, "no address of a page")
    with pytest.raises(DisaggError, match="Not a Grafana: "):
        provision.send(url, "TOKEN", None)
    monkeypatch.setenv("TOKEN", " ")
    with pytest.raises(ConfigError, match="--token-env: 'TOKEN'"):
        provision.send(url, "TOKEN", None)
    with pytest.raises(ConfigError, match="--url: 'grafana:3000'"):
        provision.send("grafana:3000", None, None)
    with pytest.raises(DisaggError, match="refused"):
        provision.send("http://127.0.0.1:1", None, None)


def test_write(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    written = provision.write(folder, "https://router.local:8443/inner/", "http://prometheus:9090")
    assert sorted(written) == sorted(path for path in folder.rglob("*") if path.is_file())
    (scrape,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["router.local:8443"]}]
    assert (scrape["scheme"], scrape["metrics_path"]) == ("https", "/inner/metrics")

    assert provision.write(folder, "http://127.0.0.1:8000", "http://127.0.0.1:9090") == written
    (scrape,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_a_file_of_another_program_stays(tmp_path: Path) -> None:
    mine = tmp_path / "prometheus.yml"
    mine.write_text("scrape_configs: []\n")
    with pytest.raises(
        ConfigError, match=r"prometheus\.yml exists and was not written by this command"
    ):
        provision.write(tmp_path, "http://a:1", "http://b:2")
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.yml"]
    assert mine.read_text() == "scrape_configs: []\n"


def test_the_compose_files_are_what_the_command_writes() -> None:
    for name, content in provision.files("http://disagg:8000", "http://prometheus:9090").items():
        if not name.endswith(".json"):  # compose mounts that one from the package
            assert (DOCKER / "monitoring" / name).read_text() == content, name


def test_command(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "disagg.cli", "dashboard", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    done = run("--folder", tmp_path)
    assert done.returncode == 0
    assert [Path(line).exists() for line in done.stdout.splitlines()] == [True] * 4
    for arguments in ((), ("--folder", tmp_path, "--url", "http://127.0.0.1:1")):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (2, "--url, --folder: give one of them\n")
    assert run("--folder", tmp_path, "--router", "router:8000").returncode == 2
