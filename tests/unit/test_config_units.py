"""Sizes and times with units."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from disagg.config_units import Bytes, Seconds


class Both(BaseModel):
    size: Bytes = Field(1, gt=0)
    time: Seconds = Field(1.0, gt=0, le=3600)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("2kB", 2000), ("7 B", 7), ("3TB", 3 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert Both(size=text).size == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("2m", 120), ("2 min", 120), ("1h", 3600)]
)
def test_times(text: str, seconds: float) -> None:
    assert Both(time=text).time == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [5, 5.0])
def test_numbers_stay(value: float) -> None:
    assert Both(size=value, time=value) == Both(size=5, time=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["64mib", "64", "MiB", "-1MiB", "1e3MiB", "0MiB", "0.3B", "64 Mi B", "", None, [1]]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Both(size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["2h", "0s", "30", "30sec", True and "s", None])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Both(time=value)  # type: ignore[arg-type]
