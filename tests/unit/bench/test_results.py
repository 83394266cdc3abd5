"""Results files: what is written can be read, and names nothing of the machine but its kind."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.bench import results
from disagg.bench.results import Machine, Result, Table, Target, target
from disagg.errors import ConfigError


def result(**changes: Any) -> Result:
    met = target("a ratio", 1.2, at="33 MB", at_least=1.0)
    missed = target("errors", 2, at_most=0)
    assert met is not None
    assert missed is not None
    fields: dict[str, Any] = {
        "schema": results.SCHEMA,
        "command": "router",
        "date": "2026-11-26T14:03Z",
        "command_line": "disagg bench router",
        "machine": Machine("AMD EPYC 7B13", cores=2),
        "versions": {"disagg": "0.1.0"},
        "tables": [Table("One", [{"way": 'a "b"', "ms": 1.5}, {"way": "c", "ms": None}])],
        "targets": [met, missed],
        "figures": {"rows": [{"x": 1}]},
    }
    return Result(**(fields | changes))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = results.save(result(), tmp_path)
    assert path.name == "2026-11-26-amd-epyc-7b13-2c-router.json"
    assert results.load(path) == result()
    assert [one.met for one in results.load(path).targets] == [True, False]
    again = results.save(result(), tmp_path)
    assert again.name == "2026-11-26-amd-epyc-7b13-2c-router-2.json"


def test_the_newest_file_of_each_command(tmp_path: Path) -> None:
    for date in ("2026-11-27", "2026-11-26T09:00Z", "2026-11-26T10:00Z"):
        results.save(result(date=date, note=date), tmp_path)
    results.save(result(date="2026-11-27", note="second run"), tmp_path)
    results.save(result(command="router-faults", date="2026-11-01"), tmp_path)
    found = results.newest(tmp_path)
    assert set(found) == {"router", "router-faults"}
    assert found["router"][1].note == "second run"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema: 2"),
        ({"date": "yesterday"}, "not a results file"),
        ({"command": "../x"}, "not a results file"),
        ({"targets": [Target("a", 1.0, True)]}, "give one of at_most and at_least"),
        ({"targets": [Target("a", 1.0, True, at_most=0.5)]}, "1 is at most 0.5: met is wrong"),
        ({"machine": Machine("Xeon", cores=2)}, "its name must begin with 2026-11-26-xeon-2c"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "2026-11-26-amd-epyc-7b13-2c-router.json"
    path.write_text(results.encode(result(**changes)))
    with pytest.raises(ConfigError) as caught:
        results.load(path)
    assert words in str(caught.value)


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    path = results.save(result(), tmp_path)
    path.write_text(path.read_text().replace('"note"', '"nota"').replace("{", '{"more": 1,', 1))
    with pytest.raises(ConfigError, match="more"):
        results.load(path)


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        ("/usr/bin/disagg bench router --rounds 8", "disagg bench router --rounds 8"),
        (
            "/x/disagg/bench/transfer/__main__.py --device cuda",
            "disagg bench transfer --device cuda",
        ),
        (
            "d bench soak --config /home/me/a.yaml --results out",
            "disagg bench soak --config a.yaml",
        ),
        ("d bench serve --json=/tmp/x --rates 2", "disagg bench serve --rates 2"),
        ("d bench serve --html /tmp/x --rates 2", "disagg bench serve --rates 2"),
        ("d plan --json --html x --speeds /a/s.json", "disagg plan --speeds s.json"),
        (
            "d bench speeds --prefill http://host:1 --out=/tmp/s",
            "disagg bench speeds --prefill URL --out=s",
        ),
    ],
)
def test_a_command_line_names_no_host_and_no_folder(called: str, shown: str) -> None:
    assert results.command_line(called.split()) == shown


def test_this_machine_and_versions_name_no_host() -> None:
    machine, found = results.this_machine(), results.versions()
    assert machine.cpu
    assert machine.cores
    assert machine.memory_gib
    assert machine.kernel
    assert platform.node() not in str((machine, found)) or len(platform.node()) < 5
    assert {"disagg", "python", "torch"} <= set(found)


@pytest.mark.parametrize(
    ("machine", "short"),
    [
        (
            Machine("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", cores=2),
            "intel-xeon-platinum-8481c-2c",
        ),
        (Machine("AMD EPYC 7B13 64-Core Processor", cores=4), "amd-epyc-7b13-4c"),
        (
            Machine("Intel(R) Xeon(R)", cores=16, gpus=["NVIDIA H100 80GB HBM3"]),
            "nvidia-h100-80gb-hbm3",
        ),
    ],
)
def test_a_short_name_of_a_machine(machine: Machine, short: str) -> None:
    assert results.slug(machine) == short


def test_a_target_that_was_not_measured_is_none() -> None:
    assert target("a", None, at_most=1) is None


def test_output_writes_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"rows": [{"x": 1}]}
    results.Output().write("router", figures, [], [])
    assert not list(tmp_path.iterdir())
    both = results.Output(tmp_path / "f.json", tmp_path / "results")
    both.write("router", figures, [Table("One", [{"x": 1}])], [None])
    assert msgspec.json.decode((tmp_path / "f.json").read_bytes()) == figures
    path, written = results.newest(tmp_path / "results")["router"]
    assert (written.figures, written.targets) == (figures, [])
    assert str(path) in capsys.readouterr().out
