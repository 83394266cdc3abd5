"""Reading the YAML: each problem is one line that names the key and the fix."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.config import load, load_all, load_router
from disagg.errors import ConfigError

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("serve_configs/*.y*ml"), *ROOT.glob("examples/*.y*ml")])


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_all(write(folder, text))
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert all(deployment.model.path for deployment in load_all(path))


def test_there_are_shipped_files() -> None:
    names = {path.name for path in SHIPPED}
    assert {"cpu-1p1d.yaml", "gpu-1p1d.yaml", "gpu-2p2d-tp2.yaml"} <= names


def test_the_smallest_file_needs_only_a_model(tmp_path: Path) -> None:
    deployment = load(write(tmp_path, "model: {path: org/name}"))
    assert deployment.prefill.replicas == deployment.decode.replicas == 1
    assert deployment.transfer.transports == [
        "cuda_ipc", "nccl", "process_memory", "tcp", "shared_storage"
    ]  # fmt: skip
    assert deployment.transfer.staging_bytes == 64 << 20


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prefill: {replicas: 0}", "prefill.replicas: 0 — must be at least 1; set 1 or more"),
        ("prefill: {replica: 2}", "prefill.replica: unknown key; did you mean replicas?"),
        ("modell: {}", "modell: unknown key; did you mean model?"),
        (
            "router: {limits: {max_body: 1}}",
            "router.limits.max_body: unknown key; did you mean max_body_bytes?",
        ),
        ("router: {port: 70000}", "router.port: 70000 — must be at most 65535; set 65535 or less"),
        ("router: {port: http}", "router.port: 'http' — must be a whole number, without quotes"),
        ("transfer: {lease_s: 0}", "transfer.lease_s: 0 — must be more than 0; set a larger value"),
        (
            "transfer: {lease_s: .nan}",
            "transfer.lease_s: nan — must be a finite number, without quotes",
        ),
        (
            "transfer: {transports: [carrier-pigeon]}",
            "transfer.transports.0: 'carrier-pigeon' — must be 'cuda_ipc', 'nccl', 'nixl', "
            "'process_memory', 'tcp' or 'shared_storage'",
        ),
        (
            "transfer: {staging_bytes: 0}",
            "transfer.staging_bytes: 0 — must be more than 0; set a larger value",
        ),
        (
            "router: {engines: {decode: ['http://ann:s3cret@h:1']}}",
            "router.engines: names engines that run already, but a deployment starts its own — "
            "remove it, or run `disagg router`",
        ),
        (
            "router: {models: [{name: a, engines: {decode: ['http://h:1']}}]}",
            "router.models: names engines that run already, but a deployment starts its own — "
            "remove it, or run `disagg router`",
        ),
        (
            "router: {engines: {decode: 'http://ann:s3cret@h:1'}}",
            "router.engines.decode: 'http://<hidden>@h:1' — must be a list, like [one, two]",
        ),
        ("transfer: {transports: []}", "transfer.transports: [] — must name at least 1"),
        ("engine: {env: {A: true}}", "engine.env.A: True — must be text; put it in quotes"),
        (
            "decode:",
            "decode: empty — must be keys with values, indented under it; "
            "remove the line to take the defaults",
        ),
    ],
)
def test_a_wrong_value_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    assert problems_of(tmp_path, f"model: {{path: org/name}}\n{text}") == [line]


URLS = "engines: {decode: ['http://h:1']}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"models: [{{{URLS}}}]", "models.0.name: missing; set it"),
        ("models: [{name: a}]", "models.0.engines: missing; set it"),
        (
            f"models: [{{name: a, {URLS}, limit: {{}}}}]",
            "models.0.limit: unknown key; did you mean limits?",
        ),
        (
            f"models: [{{name: a, {URLS}, limits: {{max_queue: 1}}}}]",
            "models.0.limits.max_queue: unknown key; did you mean max_queued?",
        ),
        (
            f"models: [{{name: a, {URLS}, limits: {{max_in_flight: 0}}}}]",
            "models.0.limits.max_in_flight: 0 — must be more than 0; set a larger value",
        ),
        (
            f"models: [{{name: a, {URLS}, connector: mooncake}}]",
            "models.0.connector: 'mooncake' — must be 'disagg', 'nixl' or 'example'",
        ),
        (f"models: {{name: a, {URLS}}}", "must be a list, like [one, two]"),
        (f"models: [{{name: a, {URLS}}}, {{name: a, {URLS}}}]", "names the model 'a' twice"),
        (f"models: [{{name: 'a b', {URLS}}}]", "models.0.name: 'a b' — must match"),
        (f"models: [{{name: /a, {URLS}}}]", "models.0.name: '/a' — must match"),
    ],
)
def test_a_wrong_model_of_a_router(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_router(write(tmp_path, text), {})
    assert len(caught.value.problems) == 1
    assert line in caught.value.problems[0]


def test_a_model_of_a_router_differs_where_it_says_so(tmp_path: Path) -> None:
    text = f"""
        pairing: {{decode: round_robin, local_prefill_tokens: 7}}
        limits: {{max_queued: 3, max_body_bytes: 1000, queue_timeout_s: 9}}
        models:
        - {{name: a, {URLS}, pairing: {{decode: least_loaded}}, limits: {{queue_timeout_s: 30}}}}
        - {{name: org/b, {URLS}}}
    """
    router = load_router(write(tmp_path, text), {})
    one, other = (router.of_model(model) for model in router.models)
    assert (one.pairing.decode, one.pairing.local_prefill_tokens) == ("least_loaded", 7)
    assert (one.limits.queue_timeout_s, one.limits.max_queued) == (30, 3)
    assert one.limits.max_body_bytes == 1000
    assert (other.pairing, other.limits) == (router.pairing, router.limits)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "name: x") == ["model: missing; set it"]
    assert problems_of(tmp_path, "model: {served_name: x}") == ["model.path: missing; set it"]


def test_a_transport_named_twice_is_refused(tmp_path: Path) -> None:
    text = "model: {path: a/b}\ntransfer: {transports: [shared_storage, shared_storage]}"
    assert problems_of(tmp_path, text)[0].startswith("transfer.transports: [")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = "model: {path: ''}\nprefill: {replicas: -1}\nrouter: {prt: 1}\n"
    assert [line.split(":")[0] for line in problems_of(tmp_path, text)] == [
        "model.path",
        "prefill.replicas",
        "router.prt",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", ":1:9: not valid YAML"),
        ("model: {path: a}\nmodel: {path: b}\n", "'model' is already on line 1"),
        ("model:\n\tpath: a\n", "not valid YAML"),
        ("when: 2026-13-45", "put the value in quotes"),
        ("- model", "a list, not sections"),
        ("", "empty"),
    ],
)
def test_a_file_that_is_no_deployment_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (line,) = problems_of(tmp_path, text)
    assert "deployment.yaml" in line
    assert words in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary")


def test_numbers_in_an_environment_become_text(tmp_path: Path) -> None:
    text = "model: {path: a/b}\nengine: {env: {OMP_NUM_THREADS: 1, X: y}}"
    assert load(write(tmp_path, text)).engine.env == {"OMP_NUM_THREADS": "1", "X": "y"}


def test_relative_paths_are_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    text = "model: {path: %s}\ntransfer: {storage: {path: kv}}\n"
    deployment = load(write(tmp_path, text % "models/there"))
    assert deployment.model.path == str(tmp_path / "models/there")
    assert deployment.transfer.storage.path == tmp_path / "kv"
    assert load(write(tmp_path, text % "org/name")).model.path == "org/name"
    assert load(write(tmp_path, text % "./gone")).model.path == str(tmp_path / "gone")
    assert load(write(tmp_path, text % ".cache/m/gone")).model.path == str(
        tmp_path / ".cache/m/gone"
    )


def test_reading_imports_nothing_heavy() -> None:
    code = "import sys, disagg.config; print({'torch', 'vllm', 'ray', 'numpy'} & set(sys.modules))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "set()"


# ---- several deployments -----------------------------------------------------------------------

SEVERAL = """
deployments:
  - name: chat
    model: {path: org/chat}
    decode: {replicas: 2}
    pairing: {decode: prefix_affinity}
    limits: {max_queued: 7}
  - name: code
    model: {path: org/code, served_name: code}
    transfer: {strict: true}
ray: {without_token: true}
router:
  port: 9000
  pairing: {local_prefill_tokens: 5}
  limits: {max_queued: 9, drain_s: 3}
"""


def test_several_deployments_share_router_and_ray(tmp_path: Path) -> None:
    chat, code = load_all(write(tmp_path, SEVERAL))
    assert (chat.group, code.group) == ("chat", "code")
    assert (chat.decode.replicas, code.decode.replicas) == (2, 1)
    assert chat.router == code.router
    assert chat.ray.without_token is True
    assert chat.router.port == 9000
    models = chat.router.models
    assert [(model.name, model.model, model.is_strict) for model in models] == [
        ("chat", "org/chat", False),
        ("code", "code", True),
    ]
    own, other = (chat.router.of_model(model) for model in models)
    assert (own.pairing.decode, own.pairing.local_prefill_tokens) == ("prefix_affinity", 5)
    assert (own.limits.max_queued, own.limits.drain_s) == (7, 3)
    assert (other.pairing.decode, other.limits.max_queued) == ("least_loaded", 9)
    # Other processes get the same.
    assert pickle.loads(pickle.dumps(chat)) == chat


def test_one_deployment_has_its_router_alone(tmp_path: Path) -> None:
    (alone,) = load_all(write(tmp_path, "model: {path: org/name}"))
    assert alone.group == ""
    assert load(write(tmp_path, "model: {path: org/name}")) == alone
    with pytest.raises(ConfigError, match="deployments: several are not possible here"):
        load(write(tmp_path, SEVERAL))


ENTRY = "{name: a, model: {path: org/name}}"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("deployments: []", ["deployments: [] — must name at least 1"]),
        ("deployments: {a: b}", ["deployments: {'a': 'b'} — must be a list, like [one, two]"]),
        (
            f"deployments: [{ENTRY}, {{name: b, model: {{path: x}}, decod: {{}}}}, {{name: c}}]",
            [
                "deployments.1.decod: unknown key; did you mean decode?",
                "deployments.2.model: missing; set it",
            ],
        ),
        (
            f"deployments: [{ENTRY}, {{name: a, model: {{path: b, served_name: org/name}}}}]",
            [
                "deployments.1.name: 'a' — deployments.0 has it too; give each deployment a name "
                "of its own",
                "deployments.1.model.served_name: 'org/name' — requests for deployments.0 name "
                "this model too; set another name",
            ],
        ),
        (
            f"model: {{path: m}}\ndecode: {{}}\ndeployments: [{ENTRY}]",
            [
                f"{key}: belongs to one deployment, but the file has a list of them; move it into "
                "an entry of deployments, or remove deployments"
                for key in ("model", "decode")
            ],
        ),
        (
            f"deployments: [{ENTRY}]\nrouter: {{models: [{{name: a, engines: {{}}}}]}}",
            [
                "router.models: names engines that run already, but a deployment starts its own — "
                "remove it, or run `disagg router`"
            ],
        ),
    ],
)
def test_problems_of_several(tmp_path: Path, text: str, lines: list[str]) -> None:
    assert problems_of(tmp_path, text) == lines


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a-", "a b", "a" * 42, "a/b"])
def test_names_that_no_deployment_of_several_may_have(tmp_path: Path, name: str) -> None:
    (line,) = problems_of(tmp_path, f"deployments: [{{name: '{name}', model: {{path: m}}}}]")
    assert line.startswith(f"deployments.0.name: {name!r} — must match")


def test_relative_paths_start_in_the_folder_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Ray job, which runs in a folder of Ray's."""
    (tmp_path / "models" / "m").mkdir(parents=True)
    path = write(tmp_path, "model: {path: models/m}\nrouter: {tls_cert_file: c, tls_key_file: k}")
    monkeypatch.setenv("DISAGG_FOLDER", str(tmp_path))
    found = load(path)
    assert found.model.path == str(tmp_path / "models" / "m")
    assert found.router.tls_cert_file == tmp_path / "c"
    monkeypatch.delenv("DISAGG_FOLDER")
    assert load(path).model.path == "models/m", "a hub's name, since there is no such folder here"


def test_changes_reach_into_lists_and_new_sections(tmp_path: Path) -> None:
    path = write(
        tmp_path, "deployments: [{name: a, model: {path: o/a}}, {name: b, model: {path: o/b}}]"
    )
    one, other = load_all(path, ["deployments.1.decode.replicas=3", "router.port=0"])
    assert (one.decode.replicas, other.decode.replicas, other.router.port) == (1, 3, 0)
    for change in ("deployments.2.decode.replicas=3", "deployments.x.decode=3"):
        with pytest.raises(ConfigError, match="there is no"):
            load_all(path, [change])
