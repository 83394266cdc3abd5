"""The page `/ui`, its history, and the paths that lead there; in a real browser where there is one,
after traffic to fake engines."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from unit.router import sharing
from unit.router.conftest import AS_OPERATOR, Loop, Setup
from unit.router.pairing.test_admission import complete, until
from unit.router.server import chromium
from unit.router.server.chromium import Page
from unit.router.server.metered_engine import MeteredEngine

from disagg.credentials import ApiKey
from disagg.router.topology import Away
from disagg.testing.http import client

Make = Callable[..., Setup]
BROWSER_S = 120.0
CHARTS = (
    "Requests a second",
    "Tokens a second",
    "First token",
    "Between tokens",
    "Failed requests a second",
    "In flight",
    "Queue",
    "KV cache in use",
    "KV moved",
)
# Of each element with text of its own: the contrast of its color with what is behind it, by WCAG.
CONTRASTS = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "NOSCRIPT", "title"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), isSvg = node.namespaceURI.endsWith("svg");
    const [a, b] = [light(rgb(isSvg ? style.fill : style.color)), light(behind(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 80)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""
# Elements that reach over the window's edge, or whose own text is cut off.
CUT_OFF = """[...document.body.querySelectorAll("main *, header *")].filter(node => {
  if (node.closest("thead") || node.tagName === "title") return false;
  const box = node.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1
    || (node instanceof HTMLElement && node.scrollWidth > (node.clientWidth || 1e9) + 1));
}).map(node => node.outerHTML.slice(0, 100))"""
LABELS = """Object.fromEntries([...document.querySelectorAll("#charts figure")].map(figure =>
  [figure.querySelector("b").textContent, figure.querySelector("svg[role=img]").ariaLabel]))"""


def history_of(setup: Setup, since: float | str = 0) -> dict[str, Any]:
    got = client().get(
        f"{setup.url}/ui/state", params={"since": since}, headers=AS_OPERATOR, timeout=10
    )
    history: dict[str, Any] = got.json()["history"]
    return history


def until_sampled(setup: Setup) -> None:
    """Until its counters count."""
    until(lambda: len(history_of(setup)["samples"]) >= 1)


def in_browser(loop: Loop, work: Callable[[Page], Awaitable[None]]) -> Page:
    """Do this with a browser. Returns the page, for what it recorded."""
    if chromium.program() is None:
        pytest.skip("no browser here: apt-get install chromium")

    async def run() -> Page:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with chromium.browser(Path(folder)) as page:
                await work(page)
                return page

    return asyncio.run_coroutine_threadsafe(run(), loop.loop).result(BROWSER_S)


def test_the_history_is_there_when_the_page_opens(make: Make) -> None:
    setup = make(kind=MeteredEngine)
    until_sampled(setup)
    for _ in range(6):
        complete(setup, list(range(20)))
    until(lambda: any(sample["speed"] for sample in history_of(setup)["samples"]))
    history = history_of(setup)
    busy = next(sample for sample in history["samples"] if sample["speed"])
    assert busy["speed"] == 2.5e9  # in the time of the handoffs, not over the two seconds
    assert busy["moved"] < 1e9
    assert busy["hidden"] == 0.6
    assert next(iter(history["samples"]))["hidden"] is None
    assert busy["to"] == {"decode-0": busy["moved"]}
    assert busy["tokens"] > 0
    assert busy["between"] == pytest.approx([0.015, 0.05], rel=0.1)
    assert busy["between_of"] == "tokens"
    assert busy["kv"] == {"prefill-0": 0.4, "decode-0": 0.4}
    total = sum(sample["requests"] or 0 for sample in history["samples"])
    assert 2 < total < 4  # six in two seconds
    newer = history_of(setup, busy["at"])["samples"]
    assert all(sample["at"] > busy["at"] for sample in newer)
    assert set(history["engines"]) == {"prefill-0", "decode-0"}


def test_the_history_is_only_for_who_asks(setup: Setup) -> None:
    assert "history" not in client().get(f"{setup.url}/ui/state").json()
    for wrong in ("x", "nan", "inf", ""):
        answer = client().get(f"{setup.url}/ui/state", params={"since": wrong})
        assert answer.status_code == 400
        assert "since" in answer.json()["error"]["message"]


def test_deaths_and_restarts_are_events(make: Make) -> None:
    setup = make(kind=MeteredEngine)

    def kinds() -> list[tuple[str, str, str]]:
        return [(e["engine"], e["kind"], e["why"]) for e in history_of(setup)["events"]]

    until_sampled(setup)
    setup.loop.run(setup.server.replace(setup.endpoints[:1], {"decode-0": Away("starts again")}))
    until(lambda: ("decode-0", "down", "starts again") in kinds())
    setup.loop.run(setup.server.replace(setup.endpoints, {}))
    until(lambda: ("decode-0", "up", "starts again") in kinds())
    complete(setup)
    until(lambda: any(sample["tokens"] for sample in history_of(setup)["samples"]))
    assert isinstance(setup.decode, MeteredEngine)
    setup.decode.restart()
    until(lambda: ("decode-0", "restarted", "") in kinds())
    assert not [event for event in kinds() if event[0] == "prefill-0"]


def test_the_root_leads_to_the_page(make: Make) -> None:
    setup = make()
    for url in (setup.url, f"{setup.url}/"):
        answer = client().get(url, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "ui")
    assert client().get(setup.url, follow_redirects=True).text.startswith("<!doctype html>")
    assert client().post(f"{setup.url}/", follow_redirects=False).status_code == 403
    published = make(section={"root_path": "/llm"})
    for path in ("/llm", "/llm/", "/"):  # the proxy takes the prefix off, or not
        answer = client().get(f"{published.url}{path}", follow_redirects=False)
        assert answer.headers["location"] == "/llm/ui", path
    assert client().get(f"{published.url}/llm/ui").status_code == 200


def test_the_page_loads_nothing_external(setup: Setup) -> None:
    page = client().get(f"{setup.url}/ui", timeout=10)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "use strict" in page.text
    text = page.text.replace("http://www.w3.org/2000/svg", "")  # the name of a language
    for outside in ("http:", "https:", "src=", "@import", "url("):
        assert outside not in text


def test_the_page_in_a_browser(make: Make, loop: Loop) -> None:
    setup = make(kind=MeteredEngine, others=("prefill", "decode"))
    until_sampled(setup)
    for _ in range(8):
        complete(setup, list(range(20)))
    gone = {"decode-1": Away("starts again")}
    setup.loop.run(setup.server.replace(setup.endpoints[:3], gone))
    until(lambda: len(history_of(setup)["events"]) == 1)

    async def work(page: Page) -> None:
        await page.look(1280)
        await page.open(f"{setup.url}/ui")
        await page.until("document.querySelectorAll('path.series').length > 8")
        labels = await page.run(LABELS)
        assert tuple(labels) == CHARTS
        for chart, label in labels.items():
            assert label.startswith(f"{chart}: "), label
            assert "no value" not in label, label
            assert "largest in ten minutes none" not in label, label
        assert "2.50 GB/s at last" in labels["KV moved"]
        assert "p50 15." in labels["Between tokens"]
        assert await page.run("document.querySelectorAll('#charts path.mark').length") == 9
        text = await page.run("document.body.innerText")
        for words in ("3 of 4 engines up", "down: starts again", "ready · not up: decode-1"):
            assert words in text, words
        flow = await page.run("document.getElementById('flow').ariaLabel")
        assert re.search(r"prefill-\d to decode-\d: [\d.]+ requests a second, [\d.]+ MB/s", flow)
        for width in (360, 1280):
            for dark in (False, True):
                await page.look(width, dark=dark)
                await page.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
                await page.run("document.querySelector('details').open = true")
                where = f"{width} px, {'dark' if dark else 'light'}"
                over = "document.scrollingElement.scrollWidth - innerWidth"
                assert await page.run(over) <= 0, where
                assert await page.run(CUT_OFF) == [], where
                contrasts = await page.run(CONTRASTS)
                assert len(contrasts) > 80
                assert contrasts[0][0] >= 4.5, (where, contrasts[:3])
        back = await page.run("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(16, 20, 24)"  # the last look was a dark one

    page = in_browser(loop, work)
    assert page.errors == []
    assert {urlsplit(url).netloc for url in page.requested} == {urlsplit(setup.url).netloc}
    assert len({urlsplit(url).path for url in page.requested}) == 2


def test_caches_that_serve_each_other_are_shown(make: Make, loop: Loop) -> None:
    """Where a deployment shares them; the page of another one says nothing of it."""
    setup = sharing.start(make, "decode-0", kind=MeteredEngine)
    setup.prefill.cached = 200
    plain = make(kind=MeteredEngine)
    for one in (setup, plain):
        until_sampled(one)
        for _ in range(3):
            complete(one, sharing.PROMPT)
    until(lambda: any(sample["shared"] for sample in history_of(setup)["samples"]))
    busy = next(sample for sample in history_of(setup)["samples"] if sample["shared"])
    assert busy["spared"] == pytest.approx(200 / len(sharing.PROMPT), rel=1e-3)
    assert sharing.HELD / 3 < busy["shared"] < 3 * sharing.HELD  # at most 3 in two seconds
    assert {sample["shared"] for sample in history_of(plain)["samples"]} == {None}

    async def work(page: Page) -> None:
        await page.look(1280)
        await page.open(f"{setup.url}/ui")
        await page.until(
            f"document.querySelectorAll('#charts figure').length === {len(CHARTS) + 2}"
        )
        labels = await page.run(LABELS)
        assert "61.5 % at last" in labels["Prompt tokens from caches"]
        assert "largest in ten minutes none" not in labels["Fetched from other caches"]
        part = await page.run("document.getElementById('sharing-part').innerText")
        assert re.search(r"granted a lease\s+3", part)
        assert f"{3 * sharing.HELD} prompt tokens came from another engine's cache" in part
        assert "caches spared 61.5 %" in part
        for width in (360, 1280):
            await page.look(width)
            await page.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
            assert await page.run(CUT_OFF) == []
        await page.open(f"{plain.url}/ui")
        await page.until("document.querySelectorAll('path.series').length > 8")
        assert tuple(await page.run(LABELS)) == CHARTS
        assert "serve each other" not in await page.run("document.body.innerText")

    assert in_browser(loop, work).errors == []


def test_the_page_without_a_mouse_and_without_eyes(make: Make, loop: Loop) -> None:
    setup = make(kind=MeteredEngine)
    until(lambda: len(history_of(setup)["samples"]) >= 3)

    async def work(page: Page) -> None:
        await page.look(1280)
        await page.open(f"{setup.url}/ui")
        await page.until("Number(document.getElementById('when').max) >= 2")
        await page.run(
            "window.spoken = 0; new MutationObserver(() => window.spoken++).observe("
            "document.querySelector('[role=status]'), "
            "{ childList: true, characterData: true, subtree: true })"
        )
        await page.key("Tab")
        assert await page.run("document.activeElement.id") == "when"
        await page.key("ArrowLeft")
        assert " ago" in await page.run("document.getElementById('when').ariaValueText")
        assert await page.run("document.querySelectorAll('line.cursor').length") == len(CHARTS)
        await page.key("Tab")
        assert await page.run("document.activeElement.id") == "now"
        await page.key("Enter")
        assert await page.run("document.getElementById('when').ariaValueText") == "now"
        seen = "document.getElementById('at').textContent"
        before = await page.run(seen)
        await page.until(f"{seen} !== {json.dumps(before)}")
        assert await page.run("window.spoken") == 0  # the state did not change
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        roles = [node["role"]["value"] for node in tree if not node["ignored"]]
        for role in ("main", "banner", "table", "columnheader", "slider", "status"):
            assert role in roles, role
        named = [n["name"]["value"] for n in tree if n["role"]["value"] in ("image", "img")]
        assert len(named) == len(CHARTS) + 1
        assert all(named)
        await page.look(360)
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        narrow = [node["role"]["value"] for node in tree if not node["ignored"]]
        for role in ("table", "columnheader", "row", "cell"):
            assert narrow.count(role) == roles.count(role), role

    assert in_browser(loop, work).errors == []


def test_words_of_engines_and_clients_are_no_markup(make: Make, loop: Loop) -> None:
    setup = make(kind=MeteredEngine, limits={"queue_timeout_s": 0.1})
    evil = "<img/src=x/onerror=alert(1)>"
    away = {"decode-0": Away(f"<b>{evil}</b>", returns=False)}
    setup.loop.run(setup.server.replace(setup.endpoints[:1], away))
    client().post(
        f"{setup.url}/v1/completions",
        json={"model": "m", "prompt": "x"},
        headers={"x-request-id": evil},
        timeout=20,
    )

    async def work(page: Page) -> None:
        await page.call("Network.setExtraHTTPHeaders", headers=AS_OPERATOR)
        await page.look(360)
        await page.open(f"{setup.url}/ui")
        await page.until("document.body.innerText.includes('503')")
        assert evil in await page.run("document.getElementById('engines').textContent")
        assert evil in await page.run("document.getElementById('failures').textContent")
        assert await page.run("document.querySelectorAll('img, main b b, td b').length") == 0

    assert in_browser(loop, work).errors == []


def test_the_page_says_since_when_the_router_is_silent(make: Make, loop: Loop) -> None:
    setup = make(kind=MeteredEngine)

    async def work(page: Page) -> None:
        await page.look(1280)
        await page.open(f"{setup.url}/ui")
        await page.until("document.getElementById('state').textContent === 'ready'")
        await setup.server.stop(0)
        await page.until(
            "/^the router does not answer since \\d\\d:\\d\\d:\\d\\d .*; what is shown is of \\d/"
            ".test(document.getElementById('state').textContent)"
        )

    in_browser(loop, work)


def test_a_key_shows_more(make: Make) -> None:
    setup = make(api_keys=[ApiKey("a", "b")], limits={"queue_timeout_s": 0.1})
    setup.loop.run(setup.server.replace(setup.endpoints[:1], {}))
    key = {"authorization": "Bearer b"}
    for _ in range(2):
        client().post(f"{setup.url}/v1/completions", json={"prompt": "x"}, headers=key, timeout=20)
    url = f"{setup.url}/ui/state"
    until(lambda: len(client().get(url).json()["failure_groups"]) == 1)
    (everybody,) = client().get(url).json()["failure_groups"]
    (client_s,) = client().get(url, headers=key).json()["failure_groups"]
    assert (everybody["status"], everybody["count"]) == (503, 2)
    assert not {"why", "id"} & set(everybody)
    assert client_s["why"]
    assert client_s["id"]
    assert everybody["first"] < everybody["last"]
