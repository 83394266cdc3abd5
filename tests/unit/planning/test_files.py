"""Traces and speeds from files: what is read, and what is said of those that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from unit.planning.loads import speeds

from disagg import cli
from disagg.errors import ConfigError
from disagg.planning import speeds as speeds_file
from disagg.planning import trace

GOOD = '{"at": 1, "prompt_tokens": 10, "output_tokens": 2}\n'
EXAMPLE = Path(__file__).parents[3] / "examples" / "speeds-cpu.json"


def problem(error: pytest.ExceptionInfo[ConfigError]) -> str:
    (line,) = error.value.problems
    return line


def test_lines_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD.replace("1,", "5,", 1) + "\n" + GOOD)
    read = trace.read(path, None, 0)
    assert (list(read.at), list(read.prompt), read.rate) == ([0.0, 4.0], [10, 10], 0.25)
    assert list(trace.read(path, 2.0, 0).at) == [0.0, 0.5]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt_tokens,output_tokens,at\n10,2,0.5\n20,3,1.5\n")
    read = trace.read(path, None, 0)
    assert (list(read.at), list(read.prompt), list(read.output)) == ([0, 1], [10, 20], [2, 3])


def test_arrivals_are_made_where_none_are(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 10, "output_tokens": 2}\n' * 4000)
    read = trace.read(path, 50.0, 7)
    assert read.rate == pytest.approx(50, rel=0.05)
    assert list(read.at) == list(trace.read(path, 50.0, 7).at)
    assert list(read.at) != list(trace.read(path, 50.0, 8).at)
    with pytest.raises(ConfigError) as caught:
        trace.read(path, None, 0)
    assert problem(caught) == f"{path}: at: on no line; set --rate to requests a second"


def test_synthetic_sizes_have_their_means() -> None:
    made = trace.synthetic("requests=20000,prompt=1000,output=200,sigma=0.5", 10.0, 0)
    assert len(made) == 20000
    assert sum(made.prompt) / 20000 == pytest.approx(1000, rel=0.02)
    assert sum(made.output) / 20000 == pytest.approx(200, rel=0.02)
    assert set(trace.synthetic("requests=9,prompt=5,output=3", 1.0, 0).prompt) == {5}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD + "{", "2: not JSON"),
        (GOOD + "[1]", "2: not a JSON object"),
        (GOOD + '{"at": 1, "prompt_tokens": 0, "output_tokens": 1}', "2: prompt_tokens: 0 — must"),
        (GOOD + '{"at": 1, "prompt_tokens": 1.5, "output_tokens": 1}', "2: prompt_tokens: 1.5 —"),
        (GOOD + '{"at": 1, "prompt_tokens": true, "output_tokens": 1}', "2: prompt_tokens: True"),
        (GOOD + '{"at": 1, "prompt_tokens": 3}', "2: output_tokens: missing; set it"),
        (GOOD + '{"at": -1, "prompt_tokens": 3, "output_tokens": 1}', "2: at: -1 — must be"),
        (GOOD + '{"at": NaN, "prompt_tokens": 3, "output_tokens": 1}', "2: at: nan — must be"),
        (GOOD + '{"prompt_tokens": 3, "output_tokens": 1}', "2: at: missing, unlike"),
        (GOOD + '{"promt_tokens": 3}', "2: promt_tokens: unknown; did you mean prompt_tokens?"),
        ("", " no requests; write lines like"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        trace.read(path, None, 0)
    assert problem(caught).startswith(f"{path}:{said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("at,prompt_tokens,output_tokens\n1,2\n", "2: not as many fields as the header"),
        ("at,prompt_tokens,output_tokens\n1,x,2\n", "2: prompt_tokens: 'x' — must be"),
        ("at,prompt,output_tokens\n1,2,2\n", "2: prompt: unknown; did you mean prompt_tokens?"),
        ("at,prompt_tokens,output_tokens\n1,,2\n", "2: prompt_tokens: missing"),
    ],
)
def test_a_wrong_csv_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        trace.read(path, None, 0)
    assert problem(caught).startswith(f"{path}:{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("requests=10,prompt=5", "--synthetic: output: missing"),
        ("requests=10,prompt=5,output=-1", "--synthetic: output: '-1' — must be"),
        ("requests=10,promt=5,output=1", "--synthetic: promt: unknown; did you mean prompt?"),
    ],
)
def test_a_wrong_description_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace.synthetic(text, 1.0, 0)
    assert problem(caught).startswith(said)


def test_speeds_come_back_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    speeds_file.save(path, speeds())
    assert speeds_file.load(path) == speeds()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prefil": {}}, "prefil: unknown key; did you mean prefill?"),
        ({"router_s": -1}, "router_s: -1 — must be at least 0"),
        ({"router_s": None}, "router_s: empty — must be a finite number"),
        ({"handoff": {"latency_s": 0}}, "handoff.bytes_per_token: missing"),
    ],
)
def test_wrong_speeds_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({**speeds().model_dump(), **change}))
    with pytest.raises(ConfigError) as caught:
        speeds_file.load(path)
    assert caught.value.problems[0].startswith(f"{path}: {said}")


def test_speeds_of_version_0_1_are_read(tmp_path: Path) -> None:
    written = speeds().model_dump()
    written["handover"] = written.pop("handoff")
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps(written))
    assert speeds_file.load(path) == speeds()


def test_the_example_is_a_file_of_speeds() -> None:
    assert speeds_file.load(EXAMPLE).measured["by"] == "disagg bench speeds"


# ---- the command ---------------------------------------------------------------------------------


class Command:
    """Runs `disagg plan` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        words = ["disagg", "plan", "--speeds", str(EXAMPLE), *arguments]
        self._monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        said = self._capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_the_command_answers_in_tables_and_json(tmp_path: Path, run: Command) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            f'{{"at": {n * 0.5}, "prompt_tokens": 500, "output_tokens": 20}}\n' for n in range(40)
        )
    )
    asked = ("--trace", str(path), "--ttft", "5", "--itl", "0.5", "--rate", "4")
    status, shown, _ = run(*asked)
    json_status, data, _ = run(*asked, "--json")
    assert status == json_status == 0
    answer = json.loads(data)
    chosen = answer["chosen"]
    assert chosen["meets"]
    assert answer["load"]["rate"] == pytest.approx(4)
    pair = f"{chosen['prefill']} prefill and {chosen['decode']} decode engines"
    assert f"{pair} are the cheapest found" in shown
    assert "Not modelled: " in shown
    _, fixed, _ = run(*asked, "--prefill", "9", "--decode", "8", "--json")
    asked_about = json.loads(fixed)["chosen"]
    assert (asked_about["prefill"], asked_about["decode"]) == (9, 8)


def test_what_no_number_of_engines_does_is_status_1(tmp_path: Path, run: Command) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD)
    asked = ("--trace", str(path), "--ttft", "0.0001", "--itl", "1")
    status, shown, _ = run(*asked)
    assert status == 1
    assert shown.startswith("no number of engines meets the targets: 1 of 1 requests miss")
    status, data, _ = run(*asked, "--json")
    assert (status, json.loads(data)["chosen"]) == (1, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ttft", "0"), "--ttft: 0 — must be a finite number, more than 0"),
        (("--share", "1.5"), "--share: 1.5 — must be more than 0 and at most 1"),
        (("--prefill", "2"), "--decode: missing; set both numbers, or none for a search"),
        (("--trace", "gone.jsonl"), "gone.jsonl: No such file or directory; name a file"),
        (("--synthetic", "requests=1,prompt=1,output=1"), "--trace: name a file, or describe"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(
    tmp_path: Path, run: Command, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(GOOD)
    status, shown, error = run("--trace", str(path), "--ttft", "1", "--itl", "1", *arguments)
    assert (status, shown) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith(said)
