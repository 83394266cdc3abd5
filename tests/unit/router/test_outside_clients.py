"""Clients that others wrote, unchanged, with what they send by default: curl, Java, Node.

Java's HttpClient and `curl --http2` offer h2c with their first request.
SDKs and browsers: `server/test_sdks.py`, `server/test_browser.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.router.conftest import Setup

Make = Callable[..., Setup]
BODY = {"model": "m", "prompt": "ä" * 3000}
TIMEOUT_S = 120

JAVA = """
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpResponse.BodyHandlers;

public class Main {
    public static void main(String[] words) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest whole = HttpRequest.newBuilder(URI.create(words[0]))
            .POST(HttpRequest.BodyPublishers.ofString(words[1])).build();
        for (int turn = 0; turn < 3; turn++) {
            HttpResponse<String> answer = client.send(whole, BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version());
        }
        // Of unknown length: chunked.
        HttpRequest chunked = HttpRequest.newBuilder(URI.create(words[0]))
            .expectContinue(true)
            .POST(HttpRequest.BodyPublishers.ofInputStream(
                () -> new java.io.ByteArrayInputStream(
                    words[1].getBytes(java.nio.charset.StandardCharsets.UTF_8)))).build();
        HttpResponse<String> answer = HttpClient.newHttpClient()
            .send(chunked, BodyHandlers.ofString());
        System.out.println(answer.statusCode() + " " + answer.version());
    }
}
"""

NODE = """
const [url, body] = process.argv.slice(1);
(async () => {
  for (let turn = 0; turn < 2; turn++) {
    const answer = await fetch(url, { method: "POST", body });
    console.log(answer.status, (await answer.text()).length > 0);
  }
  const stream = { ...JSON.parse(body), stream: true };
  const answer = await fetch(url, { method: "POST", body: JSON.stringify(stream) });
  let text = "";
  for await (const piece of answer.body) text += Buffer.from(piece).toString();
  console.log(answer.status, text.endsWith("data: [DONE]\\n\\n"));
  const again = await fetch(url.replace("completions", "models/"));
  console.log(again.status, (await again.json()).path);
})();
"""


def said(*words: str | Path) -> list[str]:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program} here")


def prompts(setup: Setup) -> list[str]:
    return [body["prompt"] for body in setup.decode.bodies]


@needs("curl")
@pytest.mark.parametrize("options", [(), ("--http2",), ("--http1.0",)], ids=" ".join)
@pytest.mark.parametrize("more", [(), ("-H", "Transfer-Encoding: chunked"),
                                  ("-H", "Expect: 100-continue")], ids=" ".join)  # fmt: skip
def test_curl(setup: Setup, options: tuple[str, ...], more: tuple[str, ...]) -> None:
    if "--http1.0" in options and "Transfer-Encoding: chunked" in more:
        pytest.skip("HTTP/1.0 has no chunks")
    url = f"{setup.url}/v1/completions"
    form = ("-sS", "--max-time", "60", "-o", "/dev/null", "-w", "%{http_code} %{http_version}\n")
    first = ("--json", json.dumps(BODY), url)
    answers = said("curl", *options, *form, *more, *first, "--next", *options, *form, *more, *first)
    assert [answer.split()[0] for answer in answers] == ["200", "200"]
    assert prompts(setup) == [BODY["prompt"]] * 2


@needs("java")
def test_java(setup: Setup, tmp_path: Path) -> None:
    source = tmp_path / "Main.java"
    source.write_text(JAVA)
    modules = subprocess.run(["java", "--list-modules"], capture_output=True, text=True,
                             check=False).stdout  # fmt: skip
    if "jdk.compiler" not in modules:
        pytest.skip("no JDK here, only a runtime")
    url = f"{setup.url}/v1/completions"
    assert said("java", source, url, json.dumps(BODY)) == ["200 HTTP_1_1"] * 4
    assert prompts(setup) == [BODY["prompt"]] * 4


@needs("node")
def test_node(setup: Setup) -> None:
    lines = said("node", "-e", NODE, f"{setup.url}/v1/completions", json.dumps(BODY))
    assert lines == ["200 true", "200 true", "200 true", "200 /v1/models"]
    assert prompts(setup) == [BODY["prompt"]] * 3
