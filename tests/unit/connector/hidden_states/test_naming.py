"""File names made of ids that clients chose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.connector.hidden_states import naming

LIFE = "0123456789abcdef"
HOSTILE = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\0b",
    "a\nb",
    "%2e%2e/",
    "-rf",
    "x" * 10_000,
    "ü" * 300,
    "\ud800",
    f"x.{LIFE}-1.safetensors",
    ".0123456789abcdef.lock",
]
# What separates, what is encoded, and what an encoding could be mistaken for.
IDS = st.one_of(
    st.text(max_size=400), st.text(alphabet="./%-2Ee\\\0~", max_size=300), st.sampled_from(HOSTILE)
)


@pytest.mark.parametrize("request_id", HOSTILE)
def test_hostile_ids(request_id: str) -> None:
    test: Any = test_a_name_is_one_plain_component_and_says_who_writes_it
    test.hypothesis.inner_test(request_id, 5)


@given(IDS, st.integers(1, 10**18))
def test_a_name_is_one_plain_component_and_says_who_writes_it(request_id: str, number: int) -> None:
    folder = Path("/some/folder")
    name = naming.file_name(request_id, LIFE, number)
    path = folder / name
    assert os.path.normpath(path) == str(path)
    assert path.parent == folder
    assert path.name == name
    assert not name.startswith(".")
    assert name.isascii()
    assert name.isprintable()
    written = naming.parse(str(path))
    assert (written.life, written.number) == (LIFE, number)
    longest = (written.path, written.error, written.lock)
    assert all(len(one.name) <= 255 for one in longest)


@given(IDS, IDS)
def test_different_ids_have_different_parts(one: str, other: str) -> None:
    assert (naming.request_part(one) == naming.request_part(other)) == (one == other)


@given(IDS)
def test_a_shortened_part_is_no_other_ids_part(request_id: str) -> None:
    part = naming.request_part("x" * 1000 + request_id)
    assert naming.request_part(part) != part


def test_one_id_twice_has_two_names() -> None:
    assert naming.file_name("a", LIFE, 1) != naming.file_name("a", LIFE, 2)
    assert naming.file_name("a", naming.new_life(), 1) != naming.file_name(
        "a", naming.new_life(), 1
    )


def test_a_plain_id_stays_as_it_is() -> None:
    assert naming.file_name("cmpl-1_a.b~0", LIFE, 7) == f"cmpl-1_a.b~0.{LIFE}-7.safetensors"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "a.safetensors",
        f"a.{LIFE}-0.safetensors",
        f"a.{LIFE}-1.safetensors.error",
        f"a.{LIFE}-1.safetensors\n",
        f"a.{LIFE.upper()}-1.safetensors",
        "",
    ],
)
def test_paths_of_others_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="hidden_states_path"):
        naming.parse(path)
