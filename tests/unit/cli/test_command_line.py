"""The command line: exit statuses, readable errors, and no work before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from disagg import __version__, cli
from disagg.cli import router
from disagg.config import (
    ConnectorName,
    CorsSection,
    Deployment,
    PairingSection,
    RouterSection,
)
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
    """Run `main` in this process, so that modules can be replaced. Returns its exit status."""
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
    for module in ("disagg", "disagg.cli"):
        command = [sys.executable, "-m", module, "--version"]
        assert subprocess.check_output(command, text=True) == f"{__version__}\n"


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


def test_the_machine_is_checked_before_serving(tmp_path: Path) -> None:
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

    def serve(deployments: Sequence[Deployment]) -> int:
        served.extend(deployments)
        return status

    replace_module(monkeypatch, "disagg.cluster", serve=serve)
    assert status_of(monkeypatch, "serve", good) == status
    assert [deployment.model.path for deployment in served] == ["org/name"]


def test_a_failed_start_shows_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: str
) -> None:
    def serve(_: Sequence[Deployment]) -> int:
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
    def serve(_: Sequence[Deployment]) -> int:
        raise TransferError("peer is gone")

    replace_module(monkeypatch, "disagg.cluster", serve=serve)
    assert status_of(monkeypatch, "serve", good) == 1
    assert capsys.readouterr().err.endswith("error: peer is gone\n")


def test_router_takes_urls_a_file_and_options_that_override_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def run_router(
        section: RouterSection, prefill: list[str], decode: list[str], **more: Any
    ) -> int:
        seen.update(section=section, prefill=prefill, decode=decode, **more)
        return 0

    replace_module(monkeypatch, "disagg.router.main", run=run_router)
    arguments: tuple[str, ...] = (
        "--prefill",
        "http://a",
        "--prefill",
        "http://b",
        "--decode",
        "http://c",
    )
    assert status_of(monkeypatch, "router", *arguments, "--port", "0") == 0
    assert seen == {
        "section": RouterSection(port=0),
        "prefill": ["http://a", "http://b"],
        "decode": ["http://c"],
        "engine_key_env": None,
        "connector": "disagg",
    }

    assert status_of(monkeypatch, "router", "--decode", "http://c", "--port", "0") == 0
    assert (seen["prefill"], seen["decode"]) == ([], ["http://c"])

    path = tmp_path / "router.yaml"
    path.write_text(
        "port: 1\nprocesses: 2\npairing: {prefill: round_robin, decode: round_robin}\n"
        "limits: {drain_s: 5}\n"
    )
    arguments += ("--config", str(path), "--port", "2", "--decode-policy", "prefix_affinity")
    arguments += ("--local-prefill-tokens", "7", "--prefill-wait-share", "0.5")
    arguments += ("--first-token", "prefill", "--first-token-hold-s", "0.25", "--no-follow")
    arguments += ("--connector", "nixl", "--engine-key-env", "E")
    assert status_of(monkeypatch, "router", *arguments) == 0
    section = seen["section"]
    assert (section.port, section.processes, section.limits.drain_s) == (2, 2, 5)
    assert section.pairing == PairingSection(
        prefill="round_robin",
        decode="prefix_affinity",
        local_prefill_tokens=7,
        prefill_wait_share=0.5,
        first_token="prefill",
        first_token_hold_s=0.25,
        follow=False,
    )
    assert (seen["engine_key_env"], seen["connector"]) == ("E", "nixl")


def test_router_takes_cors_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    replace_module(monkeypatch, "disagg.router.main", run=lambda section, *_, **__: seen.update(
        cors=section.cors, root_path=section.root_path) or 0)  # fmt: skip
    path = tmp_path / "router.yaml"
    path.write_text("cors: {allowed_origins: [a], allowed_methods: [GET]}\n")
    words = ["--decode", "http://c", "--config", str(path), "--root-path", "/llm"]
    words += ["--allowed-origins", '["*"]', "--allow-credentials"]
    assert status_of(monkeypatch, "router", *words) == 0
    expected = CorsSection(allowed_origins=["*"], allowed_methods=["GET"], allow_credentials=True)
    assert seen == {"cors": expected, "root_path": "/llm"}
    assert status_of(monkeypatch, "router", "--decode", "http://c", "--allowed-headers", "x") == 2
    assert "write a JSON list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        ("prt: 1", (), "prt: unknown key; did you mean port?"),
        ("limits: {drain_s: -1}", (), "limits.drain_s: -1 — must be at least 0; set 0 or more"),
        ("pairing: 3", ("--prefill-policy", "least_loaded"), "pairing: 3 — must be keys with"),
        ("{}", ("--processes", "0"), "processes: 0 — must be at least 1; set 1 or more"),
        ("{}", ("--decode-policy", "dice"), "pairing.decode: 'dice' — must be 'round_robin'"),
        ("{}", ("--tls-cert", "/none"), "tls_key_file: empty — tls_cert_file is '/none'; set both"),
        ("api_keys_env: UNSET_HERE", (), "api_keys_env: 'UNSET_HERE' — this variable is not set"),
        ("{}", ("--first-token", "both"), "pairing.first_token: 'both' — must be 'prefill' or"),
        ("{}", ("--first-token-hold-s", "-1"), "pairing.first_token_hold_s: -1.0 — must be at"),
        (
            "{}",
            ("--first-token-hold-s", "1"),
            "pairing: {'first_token_hold_s': 1.0} — first_token_hold_s (1) holds prefill's first",
        ),
        (
            "pairing: {first_token: prefill}",
            ("--connector", "nixl"),
            "pairing.first_token: 'prefill' — engines with the connector nixl cannot continue",
        ),
    ],
)
def test_a_wrong_router_setting_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str,
    options: tuple[str, ...],
    line: str,
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(content)
    legs = ("--prefill", "http://a", "--decode", "http://b", "--config", str(path))
    monkeypatch.setattr("disagg.router.main.claim", lambda *_: pytest.fail("it would serve"))
    assert status_of(monkeypatch, "router", *legs, *options) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


def test_connectors_have_the_names_of_the_settings() -> None:
    assert tuple(router.Connector) == get_args(ConnectorName)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("localhost:8000",), "write http://HOST:PORT"),
        (("nobody-has-this-name",), "no deployment"),
        (("http://127.0.0.1:1",), "Connection refused"),
        (("http://127.0.0.1:1", "--key-env", "UNSET_HERE"), "this variable holds no key"),
        (("https://127.0.0.1:1", "--ca", "/nonexistent"), "name a PEM file"),
    ],
)
def test_a_drain_with_wrong_options_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert status_of(monkeypatch, "drain", *arguments) > 0
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said


def test_demo_exits_with_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_module(monkeypatch, "disagg.testing.demo", run=lambda *, tiny: 1 + tiny)
    assert status_of(monkeypatch, "demo") == 1
    assert status_of(monkeypatch, "demo", "--tiny") == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_all_commands(shell: str) -> None:
    """What the shell asks for when a user presses the tab key."""

    def completed(*words: str) -> str:
        typed = ["disagg", *words, ""]
        env = {
            **os.environ,
            "_DISAGG_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": " ".join(typed),
            "COMP_CWORD": str(len(typed) - 1),
            "_TYPER_COMPLETE_ARGS": " ".join(typed),
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        code = "from disagg.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        ).stdout

    assert "serve" in completed()
    assert "handoff" in completed("bench")
    assert "remove" in completed("engines")


def test_every_command_answers_h() -> None:
    for words in ((), ("serve",), ("bench",), ("bench", "handoff"), ("engines", "add")):
        assert "Usage: disagg" in run(*words, "-h").stdout.replace("python -m ", "")


def test_a_missing_package_is_one_line_with_its_extra(tmp_path: Path) -> None:
    """As after `pip install disagg`, without an extra."""
    for name in ("ray", "vllm", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        )
    (tmp_path / "d.yaml").write_text(GOOD)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for words in (["serve", "d.yaml"], ["demo", "--tiny"], ["scale", "prefill=2"]):
        done = subprocess.run(
            [sys.executable, "-m", "disagg", *words],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        last = done.stderr.splitlines()[-1]
        assert 'pip install "disagg[cpu]"' in last
        assert "Traceback" not in done.stderr


def test_a_file_takes_changes(tmp_path: Path, good: str) -> None:
    words = ("--prefill", "3", "--decode", "2", "--set", "transfer.lease_s=2m", "--json")
    found = json.loads(run("check", good, *words, "--set", "engine.args.seed=7").stdout)
    assert (found["prefill"]["replicas"], found["decode"]["replicas"]) == (3, 2)
    assert found["decode"]["args"]["seed"] == 7
    for change, problem in (
        ("router.prt=1", "router.prt: unknown key; did you mean port?"),
        ("router", "--set: 'router' — write KEY=VALUE, such as router.port=8001"),
        ("model.path.x=1", "there is no 'x' in what the file has before it"),
        ("transfer.lease_s=soon", "must be a number, or a number with a unit"),
    ):
        refused = run("check", good, "--set", change)
        assert refused.returncode == 2
        assert problem in refused.stderr


def test_a_model_is_served_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Deployment] = []
    replace_module(monkeypatch, "disagg.cluster", serve=lambda found: served.extend(found) or 0)
    words = ("serve", "org/Some.Model-1B", "--prefill", "2", "-p", "0", "--set", "name=mine")
    assert status_of(monkeypatch, *words) == 0
    (one,) = served
    assert (one.name, one.model.path, one.model.served_name) == (
        "mine",
        "org/Some.Model-1B",
        "Some.Model-1B",
    )
    assert (one.prefill.replicas, one.decode.replicas, one.router.port) == (2, 1, 0)


def test_init_writes_a_file_that_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "disagg.yaml"
    written = run("init", "org/name", "-o", str(path))
    assert written.returncode == 0
    assert f"next: disagg serve {path}" in written.stdout
    assert run("check", str(path), "--port", "0").returncode == 0
    again = run("init", "org/name", "-o", str(path))
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    missing = run("init", str(tmp_path / "smollm2-135m"), "-o", str(path), "--force")
    assert "disagg get-model smollm2-135m" in missing.stdout


def test_the_schema_is_valid_and_takes_what_we_ship() -> None:
    schema = json.loads(run("schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for file in sorted((Path(__file__).parents[3] / "serve_configs").glob("*.yaml")):
        validator.validate(yaml.safe_load(file.read_text()))
    good = yaml.safe_load(GOOD)
    validator.validate(good | {"transfer": {"lease_s": "30s", "staging_bytes": "64MiB"}})
    odd: list[dict[str, Any]] = [{"prefil": {}}, {"transfer": {"lease_s": "30 parsecs"}}]
    for wrong in odd:
        assert not validator.is_valid(good | wrong)
