"""A page of another origin that uses the API: in a real browser where there is one, and replayed.

`apt-get install chromium-headless-shell` brings a browser (300 MB).
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from unit.router.conftest import wait_for
from unit.router.server.api_engine import TEXT, WORDS, ApiEngine
from unit.router.server.conftest import Models, StartModels

from disagg.credentials import ApiKey

TIMEOUT_S = 60.0
NO_MODEL = "The model `other` does not exist; there are: org/chat"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
KEY = ApiKey("page", "of-a-page")
BODY = {"model": "org/chat", "messages": [{"role": "user", "content": "Wörter?"}]}

PAGE = """<!doctype html><meta charset="utf-8"><script>
const url = "%(url)s/v1/chat/completions", body = %(body)s;
const say = (content) => fetch("/said", { method: "POST", body: JSON.stringify(content) });
const ask = (more, options = {}) => fetch(url, {
  method: "POST",
  headers: { authorization: "Bearer %(key)s", "content-type": "application/json" },
  body: JSON.stringify({ ...body, ...more }),
  ...options,
});
async function* events(answer) {
  let rest = "";
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
    rest += text;
    const parts = rest.split("\\n\\n");
    rest = parts.pop();
    for (const part of parts) yield part.slice("data: ".length);
  }
}
const word = (event) => JSON.parse(event).choices[0].delta.content;
const turns = {
  async whole() {
    const answer = await ask({});
    const text = (await answer.json()).choices[0].message.content;
    return [answer.status, text, answer.headers.get("x-request-id") !== null];
  },
  async stream() {
    const words = [];
    let last;
    for await (const event of events(await ask({ stream: true }))) {
      last = event;
      if (event !== "[DONE]" && word(event)) words.push(word(event));
    }
    return [words, last];
  },
  async error() {
    const answer = await ask({ model: "other", stream: true });
    return [answer.status, (await answer.json()).error.message];
  },
  async no_key() {
    const answer = await ask({}, { headers: { "content-type": "application/json" } });
    return [answer.status, (await answer.json()).error.code];
  },
  async leaves_stream() {
    const stop = new AbortController();
    try {
      for await (const event of events(await ask({ stream: true }, { signal: stop.signal })))
        if (word(event)) stop.abort();
    } catch (error) {
      return error.name;
    }
  },
  async leaves_whole() {
    const stop = new AbortController();
    fetch("/go").then(() => stop.abort());
    try {
      await ask({}, { signal: stop.signal });
    } catch (error) {
      return error.name;
    }
  },
  async reads_on() {
    for await (const event of events(await ask({ stream: true })))
      if (word(event)) await say("reading");
  },
};
turns["%(turn)s"]().then(say, (error) => say(`failed: ${error}`));
</script>"""


class Site(http.server.ThreadingHTTPServer):
    """The page's server: another origin than the router's. `said`: what the page posted to it.
    `go`: lets the page go on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page, self.said = "", queue.Queue[Any]()
        self.go = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_word(self) -> Any:
        return self.said.get(timeout=TIMEOUT_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        if self.path == "/go":
            self.server.go.wait(TIMEOUT_S)
        self._answer(self.server.page.encode() if self.path == "/" else b"")

    def do_POST(self) -> None:
        self.server.said.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b"")

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site
        site.shutdown()


@pytest.fixture
def models(start_models: StartModels, site: Site) -> Models:
    cors = {"allowed_origins": [site.origin]}
    return start_models(names=["org/chat"], kind=ApiEngine, api_keys=[KEY], cors=cors)


@pytest.fixture
def engine(models: Models) -> ApiEngine:
    engine = models.decode("org/chat")
    assert isinstance(engine, ApiEngine)
    return engine


# ---- replayed: what Chromium 156 sends --------------------------------------------------------

PATH = "/v1/chat/completions"
COMMON = {
    "connection": "keep-alive",
    "user-agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) "
    "Chrome/156.0.0.0 Safari/537.36",
    "accept": "*/*",
    "sec-fetch-mode": "cors",
    "sec-fetch-site": "same-site",
    "sec-fetch-dest": "empty",
    "accept-encoding": "gzip, deflate, br, zstd",
}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
POST = {
    "authorization": f"Bearer {KEY.value}",
    "content-type": "application/json",
    "sec-ch-ua": '"Not:A-Brand";v="8", "Chromium";v="156"',
    "sec-ch-ua-mobile": "?0",
    "sec-ch-ua-platform": '"Linux"',
}


def test_a_preflight_and_a_stream(models: Models, site: Site, engine: ApiEngine) -> None:
    page = COMMON | {"origin": site.origin, "referer": f"{site.origin}/"}
    with httpx.Client(base_url=models.url, timeout=TIMEOUT_S) as tab:
        may = tab.options(PATH, headers=page | PREFLIGHT)
        assert may.status_code == 200
        assert may.headers["access-control-allow-origin"] == site.origin
        assert may.headers["access-control-allow-headers"] == "authorization,content-type"
        assert not engine.bodies
        answer = tab.post(PATH, headers=page | POST, json=BODY | {"stream": True})
        assert answer.headers["access-control-allow-origin"] == site.origin
        assert "content-encoding" not in answer.headers
        assert answer.text.count("data: {") == len(WORDS) + 2
        assert answer.text.endswith("data: [DONE]\n\n")
        refused = tab.post(PATH, headers=page | POST, json=BODY | {"model": "other"})
        assert refused.status_code == 404
        assert refused.headers["access-control-allow-origin"] == site.origin
        assert refused.json()["error"]["message"] == NO_MODEL


def test_a_page_that_is_closed(models: Models, site: Site, engine: ApiEngine) -> None:
    engine.endless = True
    page = COMMON | {"origin": site.origin}
    with (
        httpx.Client(base_url=models.url, timeout=TIMEOUT_S) as tab,
        tab.stream("POST", PATH, headers=page | POST, json=BODY | {"stream": True}) as answer,
    ):
        lines = answer.iter_lines()  # kept: without it, httpx closes the connection
        assert any(WORDS[0] in line for line in lines)
        assert not engine.left.is_set()
    assert engine.left.wait(TIMEOUT_S)


# ---- a real browser --------------------------------------------------------------------------

OpenPage = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def open_page(models: Models, site: Site, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens the page in a browser of its own, for one of its turns, at a name of this machine."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser here: apt-get install chromium-headless-shell")
    browsers: list[subprocess.Popen[bytes]] = []

    def start(turn: str, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
        values = {"url": models.url, "body": json.dumps(BODY), "key": KEY.value, "turn": turn}
        site.page = PAGE % values
        # Without its sandbox, which root and containers have not. It reads only this page.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", f"--user-data-dir={tmp_path / turn}"]
        # Its debugging port keeps it running, which would end once the page is loaded.
        page = f"http://{host}:{site.server_port}/"
        command = [program, *options, "--remote-debugging-port=0", page]
        browsers.append(
            subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        return browsers[-1]

    yield start
    for browser in browsers:
        close(browser)


def close(browser: subprocess.Popen[bytes]) -> None:
    """End the browser, all its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(browser.pid, signal.SIGKILL)
    browser.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("whole", [200, TEXT, True]),
        ("stream", [list(WORDS), "[DONE]"]),
        ("error", [404, NO_MODEL]),
        ("no_key", [401, 401]),
    ],
)
def test_a_page_may_read_answers(open_page: OpenPage, site: Site, turn: str, said: Any) -> None:
    open_page(turn)
    assert site.next_word() == said


def test_a_page_of_another_origin_may_not(
    open_page: OpenPage, site: Site, engine: ApiEngine
) -> None:
    open_page("whole", "localhost")  # the same page by another name is of another origin
    assert site.next_word() == "failed: TypeError: Failed to fetch"
    assert not engine.bodies


@pytest.mark.parametrize("turn", ["leaves_stream", "leaves_whole"])
def test_a_page_that_aborts(open_page: OpenPage, site: Site, engine: ApiEngine, turn: str) -> None:
    engine.endless = True
    browser = open_page(turn)
    if turn == "leaves_whole":
        assert wait_for(lambda: engine.bodies, TIMEOUT_S)
        assert not engine.left.is_set()
        site.go.set()
    assert site.next_word() == "AbortError"
    assert engine.left.wait(TIMEOUT_S)
    assert browser.poll() is None  # the page is still open


def test_a_browser_that_is_closed(open_page: OpenPage, site: Site, engine: ApiEngine) -> None:
    engine.endless = True
    browser = open_page("reads_on")
    assert site.next_word() == "reading"
    assert not engine.left.is_set()
    close(browser)
    assert engine.left.wait(TIMEOUT_S)
