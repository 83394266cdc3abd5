"""The command line: exit statuses, readable errors, and no work before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

from disagg import __version__, cli
from disagg.config import Deployment
from disagg.errors import StartupError, TransferError

GOOD = "model: {path: org/name}\nrouter: {port: 0}\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `main` in this process, so that modules can be replaced; its exit status."""
    monkeypatch.setattr(sys, "argv", ["disagg", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return str(path)


def test_version() -> None:
    done = run("version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, disagg.cli\n"
        "try: disagg.cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'ray', 'numpy', 'fastapi', 'pydantic', 'yaml'}"
        " & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "make-model" in output
    assert output.splitlines()[-1] == "[]"


def test_check_prints_the_plan(good: str) -> None:
    plain, as_json = run("check", good), run("check", good, "--json")
    assert plain.returncode == as_json.returncode == 0
    assert yaml.safe_load(plain.stdout) == json.loads(as_json.stdout)
    assert json.loads(as_json.stdout)["model"]["path"] == "org/name"


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_file_is_one_line_per_problem_and_status_2(command: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {path: a/b}\nprefill: {replicas: 0}\nrouter: {prt: 1}\n")
    done = run(command, str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "prefill.replicas: 0 — must be at least 1; set 1 or more",
        "router.prt: unknown key; did you mean port?",
    ]


def test_what_only_the_machine_knows_is_checked_before_serving(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: {path: ./gone}\nrouter: {port: 0}\n")
    done = run("serve", str(path))
    assert done.returncode == 2
    assert done.stderr.startswith("model.path: ")


def test_make_model_says_what_it_did(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = str(tmp_path / "model")
    size = ("--layers", "1", "--hidden", "64", "--vocab-size", "300")
    assert run("make-model", folder, *size).stdout == f"{folder}: written\n"
    assert run("make-model", folder, *size).stdout == f"{folder}: already there\n"
    other = run("make-model", folder, *size, "--seed", "1")
    assert other.returncode == 2
    assert "seed 0 instead of 1" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize("status", [0, 1, 130])
def test_serve_exits_with_the_clusters_status(
    monkeypatch: pytest.MonkeyPatch, good: str, status: int
) -> None:
    served: list[Deployment] = []

    def serve(deployment: Deployment) -> int:
        served.append(deployment)
        return status

    replace_module(monkeypatch, "disagg.cluster", serve=serve)
    assert status_of(monkeypatch, "serve", good) == status
    assert served[0].model.path == "org/name"


def test_a_failed_start_shows_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: str
) -> None:
    def serve(_: Deployment) -> int:
        raise StartupError("prefill-0 did not start: out of memory", "line one\nline two")

    replace_module(monkeypatch, "disagg.cluster", serve=serve)
    assert status_of(monkeypatch, "serve", good) == 1
    error = capsys.readouterr().err
    assert "error: prefill-0 did not start: out of memory\n" in error
    assert "line one\nline two" in error
    assert "Traceback" not in error


def test_no_error_of_ours_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: str
) -> None:
    def serve(_: Deployment) -> int:
        raise TransferError("peer is gone")

    replace_module(monkeypatch, "disagg.cluster", serve=serve)
    assert status_of(monkeypatch, "serve", good) == 1
    assert capsys.readouterr().err.endswith("error: peer is gone\n")


def test_router_takes_several_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def run_router(**options: object) -> int:
        seen.update(options)
        return 0

    replace_module(monkeypatch, "disagg.router.main", run=run_router)
    arguments = ("--prefill", "http://a", "--prefill", "http://b", "--decode", "http://c")
    assert status_of(monkeypatch, "router", *arguments, "--port", "0") == 0
    assert seen == {
        "prefill": ["http://a", "http://b"],
        "decode": ["http://c"],
        "host": "127.0.0.1",
        "port": 0,
    }


def test_demo_exits_with_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_module(monkeypatch, "disagg.bench.demo", run=lambda: 1)
    assert status_of(monkeypatch, "demo") == 1


def test_bench_owns_its_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    owned = typer.Typer()
    seen: list[int] = []

    @owned.callback()
    def measure() -> None:
        """Keep `handoff` a command, though it is the only one."""

    @owned.command()
    def handoff(requests: int = 0) -> None:
        seen.append(requests)
        raise typer.Exit(3)

    replace_module(monkeypatch, "disagg.bench.cli", app=owned)
    assert status_of(monkeypatch, "bench", "handoff", "--requests", "7") == 3
    assert seen == [7]
