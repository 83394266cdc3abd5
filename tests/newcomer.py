"""Plays somebody who has just found the project: a fresh clone, README's commands as printed, a
wheel in an empty environment, a job on a Ray of its own, and the examples that run here.

    python tests/newcomer.py            all of it, about twenty minutes
    python tests/newcomer.py wheel      the wheel alone, which `make test` plays too

The commands are read from README.md: the blocks that begin with ```sh. What `make serve` starts is
served while the block after it runs. Everything happens in a temporary folder, and ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_START_S, _COMMAND_S = 300.0, 900.0
_COLLECTOR = "http://127.0.0.1:4318"


def main() -> int:
    """Play. Returns the exit status."""
    parts: dict[str, Callable[[Path], None]] = {
        "wheel": wheel, "readme": readme, "job": job, "examples": examples
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    chosen = parser.parse_args().parts or list(parts)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for name in chosen:
            print(f"== {name}", flush=True)
            began = time.monotonic()
            parts[name](Path(folder))
            print(f"== {name}: fine, {time.monotonic() - began:.0f} s", flush=True)
    return 0


# ---- the parts -------------------------------------------------------------------------------


def wheel(folder: Path) -> None:
    """Build it as PyPI would get it, install it without extras, and use what needs none."""
    source = clone(folder)
    built = folder / "dist"
    run(f"{sys.executable} -m build --outdir {built} {source}", folder)
    (made,) = built.glob("*.whl")
    run(f"{sys.executable} -m twine check --strict {built}/*", folder)
    venv = folder / "empty"
    run(f"{uv()} venv --quiet --python {sys.executable} {venv}", folder)
    run(f"{uv()} pip install --quiet --python {venv} {made}", folder)
    disagg = venv / "bin" / "disagg"
    assert run(f"{disagg} --version", folder).strip() in made.name
    if shutil.which("cc"):
        run(f"{venv}/bin/python -c 'import disagg.router.caches.native_keys'", folder)
    run(f"{disagg} init org/name -o {folder}/d.yaml && {disagg} check {folder}/d.yaml", folder)
    run(f"{disagg} ls && {disagg} schema > schema.json && {disagg} bench --help", folder)
    for words in ("serve d.yaml", "demo --tiny", "get-model", "bench handoff"):
        said = run(f"{disagg} {words}", folder, status=2)
        assert 'pip install "disagg[cpu]"' in said, said
        assert "Traceback" not in said, said


def readme(folder: Path) -> None:
    """The commands of README, one block after the other."""
    source = clone(folder)
    text = (source / "README.md").read_text()
    for found in _BLOCK.finditer(text):
        before = text[: found.start()].rpartition("```")[2]
        with served("make serve", source) if "`make serve`" in before else contextlib.nullcontext():
            run(f"set -e\n{_from_folder(found[1])}", source)


def _from_folder(command: str) -> str:
    """PyTorch's builds for CPUs come from the folder of wheels, where there is one, as in the
    Makefile."""
    wheels = os.environ.get("PIP_FIND_LINKS")
    return command.replace("--torch-backend cpu", f"--find-links {wheels}") if wheels else command


def job(folder: Path) -> None:
    """`examples/ray_job.sh` on a Ray of its own, as a laptop has it."""
    source = clone(folder)
    run("make install && .venv/bin/disagg get-model", source)
    env = {"PATH": f"{source}/.venv/bin:{os.environ['PATH']}", "RAY_AUTH_MODE": "token"}
    ray = f"{source}/.venv/bin/ray"
    # Its ports are below those of Ray's workers. `ray stop` would end every Ray on this machine.
    start = f"{ray} start --head --block --node-ip-address 127.0.0.1 --port 9379 --num-cpus 2"
    start += f" --dashboard-port 9265 --temp-dir {tempfile.mkdtemp(prefix='r-', dir='/tmp')}"
    with served(start, source, ready="Ray runtime started", env=env):
        env["RAY_ADDRESS"] = "http://127.0.0.1:9265"
        said = run("examples/ray_job.sh serve_configs/cpu-1p1d.yaml", source, env=env)
        name = set(re.findall(r"raysubmit_\w+", said)).pop()
        until(lambda: "Ready: " in run(f"{ray} job logs {name}", source, env=env))
        run(f"{source}/.venv/bin/python examples/chat.py 'What is the capital of France?'", source)
        run(f"{ray} job stop {name}", source, env=env)
        left = Path(tempfile.gettempdir(), f"disagg-{os.getuid()}").glob("disagg-run-*")
        print("left:", [one.name for one in left])


def examples(folder: Path) -> None:
    """Those that need neither a GPU nor Kubernetes nor a container."""
    source = clone(folder)
    run("make install && .venv/bin/disagg get-model", source)
    run(".venv/bin/disagg make-model .cache/models/tiny", source)
    python = f"{source}/.venv/bin/python"
    run(f"{python} examples/without_vllm_engine.py", source)
    with served("make serve", source):
        run(f"{python} examples/chat.py 'What is the capital of France?'", source)
        (source / "in.jsonl").write_text(
            "".join(
                f'{{"custom_id": "{n}", "method": "POST", "url": "/v1/completions", "body": '
                f'{{"model": "smollm2-135m", "prompt": "{n} and", "max_tokens": 4}}}}\n'
                for n in range(6)
            )
        )
        said = run(f"{python} examples/batch.py in.jsonl out.jsonl", source)
        assert len((source / "out.jsonl").read_text().splitlines()) == 6, said
    _plain_servers(source, python)
    with served(f"{python} examples/traces.py", source, ready="listening on", log="traces.log"):
        spans = f"--set engine.args.otlp_traces_endpoint={_COLLECTOR}/v1/traces"
        spans += " --set engine.env.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
        serve = f"{source}/.venv/bin/disagg serve serve_configs/cpu-1p1d.yaml {spans}"
        with served(serve, source, env={"OTEL_EXPORTER_OTLP_ENDPOINT": _COLLECTOR}):
            run(f"{python} examples/chat.py 'What is the capital of France?'", source)
            until(lambda: "decode" in (source / "traces.log").read_text())
    run(f"{source}/.venv/bin/disagg make-model .cache/models/wide --hidden 512", source)
    with served(f"{source}/.venv/bin/disagg serve examples/two_models.yaml", source):
        for model in ("tiny", "wide"):
            run(_ask(model), source)
    run(f"{python} examples/hidden_states.py", source)
    if os.geteuid() == 0:
        run(f"cd {source} && {python} -m examples.streaming streaming.svg", source)


def _plain_servers(source: Path, python: str) -> None:
    """vLLM's own servers with our connector, and with vLLM's."""
    options = ".cache/models/tiny --enforce-eager --block-size 128"
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"OMP_NUM_THREADS": "1", "KV_BUFFER_DEVICE": "cpu"}
    packages = "--no-deps nixl==1.5.1 nixl-cu13==1.5.1"  # as the second one says
    run(f"{uv()} pip install --quiet --python {python} {packages}", source)
    for script in ("plain_vllm.sh", "nixl_vllm.sh"):
        with served(f"examples/{script} {options}", source, env=env):
            if script == "plain_vllm.sh":
                engines = "http://127.0.0.1:8101 http://127.0.0.1:8102"
                run(f"{python} examples/handoff.py {engines}", source)
            run(_ask(".cache/models/tiny"), source)


def _ask(model: str) -> str:
    """A completion of 400 words."""
    body = f'{{"model": "{model}", "prompt": "{"so " * 400}", "max_tokens": 4}}'
    return (
        "curl -sSf http://127.0.0.1:8000/v1/completions "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


# ---- tools -----------------------------------------------------------------------------------


def clone(folder: Path) -> Path:
    """A clone of what is committed, with nothing that is installed here."""
    source = folder / "disagg"
    if not source.exists():
        run(f"git clone --quiet {ROOT} {source}", folder)
    return source


def uv() -> str:
    """uv's command, beside this Python or in the path."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else (shutil.which("uv") or "uv")


def run(
    command: str, folder: Path, *, env: dict[str, str] | None = None, status: int | None = 0
) -> str:
    """What the command prints, which is also shown. Its status must be this, if there is one."""
    print("\n".join(f"$ {line}" for line in command.strip().splitlines()), flush=True)
    tools = f"{Path(uv()).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": tools, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    print("\n".join(done.stdout.splitlines()[-25:]), flush=True)
    assert status in (None, done.returncode), f"status {done.returncode}, not {status}"
    return done.stdout


@contextlib.contextmanager
def served(
    command: str,
    folder: Path,
    *,
    ready: str = "Ready: ",
    env: dict[str, str] | None = None,
    log: str = "served.log",
) -> Iterator[None]:
    """The command in a session of its own until it says that it is ready; its group gets SIGTERM
    afterwards, as from a supervisor, and must leave nothing."""
    print(f"$ {command} &", flush=True)
    said = folder / log
    with said.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: ready in said.read_text() or process.poll() is not None)
        assert process.poll() is None, said.read_text()
        yield
    finally:
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        print(f"ended after {time.monotonic() - began:.1f} s", flush=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
