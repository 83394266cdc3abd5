"""`disagg plan`: its tables, its JSON and its exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from disagg import cli

GOOD = '{"at": 1, "prompt_tokens": 10, "output_tokens": 2}\n'
EXAMPLE = Path(__file__).parents[3] / "examples" / "speeds-cpu.json"


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


def test_unreachable_targets_are_status_1(tmp_path: Path, run: Command) -> None:
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
        (("--prefill", "2"), "--decode: missing; set both numbers, or neither for a search"),
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
