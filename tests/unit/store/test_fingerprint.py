"""Namespaces: who shares one, and who is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.store.fingerprint import RECORD, Fingerprint, claim

FIELDS = {"model": "org/Some Model", "dtype": "bfloat16", "kv_dtype": "fp8", "tp_size": "2"}
HASHING = {"hash_algorithm": "xxhash", "hash_seed": "1f"}


def test_the_order_of_fields_does_not_matter_their_values_do() -> None:
    one = Fingerprint(FIELDS, HASHING)
    assert one.namespace == Fingerprint(dict(reversed(FIELDS.items()))).namespace
    assert one.namespace.startswith("org_Some_Model-")
    names = {Fingerprint({**FIELDS, name: "other"}).namespace for name in FIELDS}
    assert len(names | {one.namespace}) == 5


def test_fields_and_values_are_not_run_together() -> None:
    assert Fingerprint({"a": "b,c"}).namespace != Fingerprint({"a": "b", "c": ""}).namespace
    with pytest.raises(ValueError, match="hash_seed"):
        Fingerprint({"hash_seed": "1"}, {"hash_seed": "1"})


@pytest.mark.parametrize("model", ["", "../..", "a/../../b", "/etc", ".hidden", "x" * 500, "ü\n"])
def test_a_model_s_name_leads_nowhere_else(tmp_path: Path, model: str) -> None:
    folder = claim(tmp_path, Fingerprint({"model": model})).path
    assert folder.resolve().parent == tmp_path.resolve()
    assert not folder.name.startswith(".")


def test_the_same_engine_again(tmp_path: Path) -> None:
    folders = {claim(tmp_path, Fingerprint(FIELDS, HASHING)) for _ in range(3)}
    assert len(folders) == 1
    assert [path.name for path in folders.pop().path.iterdir()] == [RECORD]


def test_another_hash_seed_is_refused(tmp_path: Path) -> None:
    claim(tmp_path, Fingerprint(FIELDS, HASHING))
    other = Fingerprint(FIELDS, {**HASHING, "hash_seed": "2e"})
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path, other)
    for part in ("hash_seed is '2e' here, '1f' there", "PYTHONHASHSEED", "sha256", str(tmp_path)):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match="hash_algorithm is None here, 'xxhash' there"):
        claim(tmp_path, Fingerprint(FIELDS, {"hash_seed": "1f"}))
    claim(tmp_path, Fingerprint({**FIELDS, "tp_size": "4"}, other.hashing))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"hashing": 3}', '{"hashing": {"a', "null"])
def test_a_damaged_record_is_written_anew(tmp_path: Path, content: str) -> None:
    folder = claim(tmp_path, Fingerprint(FIELDS, HASHING))
    (folder.path / RECORD).write_text(content)
    claim(tmp_path, Fingerprint(FIELDS, HASHING))
    with pytest.raises(ConfigError, match="hash_seed"):
        claim(tmp_path, Fingerprint(FIELDS, {}))


def test_of_many_at_once_one_hashing_wins(tmp_path: Path) -> None:
    start, outcomes = threading.Barrier(8), []

    def engine(seed: str) -> None:
        start.wait()
        try:
            claim(tmp_path, Fingerprint(FIELDS, {"hash_seed": seed}))
            outcomes.append(seed)
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=engine, args=(str(i % 2),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[:4] in (["0"] * 4, ["1"] * 4)
    assert outcomes.count("refused") == 4
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == [RECORD]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        claim(tmp_path / "file", Fingerprint(FIELDS))
