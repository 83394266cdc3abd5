"""Traces from files and descriptions: their requests, and the errors for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.planning import trace

GOOD = '{"at": 1, "prompt_tokens": 10, "output_tokens": 2}\n'


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


def test_a_file_without_arrivals_gets_poisson_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 10, "output_tokens": 2}\n' * 4000)
    read = trace.read(path, 50.0, 7)
    assert read.rate == pytest.approx(50, rel=0.05)
    assert list(read.at) == list(trace.read(path, 50.0, 7).at)
    assert list(read.at) != list(trace.read(path, 50.0, 8).at)
    with pytest.raises(ConfigError) as caught:
        trace.read(path, None, 0)
    assert problem(caught) == f"{path}: at: on no line; set --rate to the requests per second"


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
