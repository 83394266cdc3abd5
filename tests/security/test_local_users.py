"""Another user of this machine reads and writes nothing of ours, and makes us do nothing.

Threat model, line 2. The other user is a real uid, in processes of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHER = 65534
BECOME = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")

ENGINE = """
from pathlib import Path
from disagg.connector.handoff.settings import read_settings
from disagg.transport.control.secret import read_secret
from transport import caches
from transport.caches import PLAIN
from disagg.transport.shared_storage import SharedStorageSender
sender = SharedStorageSender(caches.make(PLAIN, 1), read_settings({}).storage(read_secret()))
print(sender._folder.path)
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that all users share, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="", dir="/tmp"))  # short, for the sockets of Ray
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    monkeypatch.delenv("DISAGG_SECRET", raising=False)
    yield folder
    shutil.rmtree(folder)


def as_other(script: str, *args: str | Path) -> str:
    """What a shell script of the other user prints. It must not fail."""
    done = subprocess.run(
        [*BECOME, "sh", "-c", script, "sh", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    return done.stdout


def ours(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A Python program of ours."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_other_user_reads_and_enters_nothing(temporary: Path) -> None:
    made = ours(ENGINE)
    assert made.returncode == 0, made.stderr
    folder = Path(made.stdout.strip())
    assert list(folder.glob("*.probe")), "nothing was written, so nothing is tested"
    seen = as_other('find "$1" -mindepth 1 2>/dev/null || true', temporary).split()
    assert seen == [str(temporary / f"disagg-{os.getuid()}")], "only that the folder exists"
    assert as_other('ls "$1" 2>&1 || true', seen[0]).count("Permission denied")
    as_other('! touch "$1/x" 2>/dev/null', seen[0])


@pytest.mark.parametrize("plant", ["folder", "open folder", "symlink"])
def test_a_planted_folder_is_refused_by_name_and_stays_empty(temporary: Path, plant: str) -> None:
    target = temporary / f"disagg-{os.getuid()}"
    make = {
        "folder": 'mkdir -m 700 "$1"',
        "open folder": 'mkdir "$1" && chmod 777 "$1"',
        "symlink": 'mkdir -m 777 "$1.theirs" && ln -s "$1.theirs" "$1"',
    }
    as_other(make[plant], target)
    refused = ours(ENGINE)
    assert refused.returncode != 0
    assert "ConfigError" in refused.stderr
    assert str(target) in refused.stderr
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


SCALE = """
import sys
from disagg.cli import app
sys.argv = ["disagg", "scale", "prefill=2"]
app()
"""


@pytest.mark.parametrize("plant", ["parent", "run"])
def test_a_planted_ray_gets_no_byte(temporary: Path, plant: str) -> None:
    """`disagg scale` would send the user's token there, and unpickle the answer."""
    parent = temporary / f"disagg-ray-{os.getuid()}"
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); s.accept(); print('CONNECTED', flush=True)"
    )
    server = subprocess.Popen(
        [*BECOME, sys.executable, "-c", serve],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert server.stdout is not None
    address = f"127.0.0.1:{int(server.stdout.readline())}"
    if plant == "parent":
        as_other('mkdir -p "$1/r-abc" && printf %s "$2" > "$1/r-abc/address"', parent, address)
    else:
        # As it was: Ray opens its folder for everybody, and another user changes the address.
        parent.mkdir(mode=0o700)
        (parent / "r-abc").mkdir(mode=0o700)
        (parent / "r-abc" / "address").write_text(address)
        (parent / "r-abc" / "address").chmod(0o600)
    done = ours(SCALE)
    assert done.returncode != 0
    assert server.poll() is None, "it was connected to"
    server.kill()
    server.wait(10)
    server.stdout.close()
    said = (done.stderr + done.stdout).replace("\n", " ")
    assert (str(parent) if plant == "parent" else "no deployment runs on this machine") in said


def test_nothing_of_the_users_is_removed_at_start(temporary: Path) -> None:
    """A checkpoint, an adapter and hidden states lie in the folder that was configured."""
    folder = temporary / "models"
    folder.mkdir(mode=0o700)
    names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "adapter_model.safetensors",
        "cmpl-7.0123456789abcdef-1.safetensors",
        "download.tmp",
        "x.probe",
    ]
    for name in names:
        (folder / name).write_bytes(b"precious")
        os.utime(folder / name, (0, 0))
    made = ours(
        ENGINE.replace("read_settings({})", f"read_settings({{'storage_path': {str(folder)!r}}})")
    )
    assert made.returncode == 0, made.stderr
    assert {name for name in names if (folder / name).exists()} == set(names)
