"""Failures in groups: bounded, merged over processes, and cut for who has no key."""

from __future__ import annotations

from disagg.router.server.failures import Failures, merged, open_part
from disagg.router.telemetry.access_log import Record


def noted(*whys: str | None, status: int = 503) -> Failures:
    failures = Failures()
    for number, why in enumerate(whys):
        failures.note(status, Record("/v1/completions", f"id-{number}"), why)
    return failures


def test_reasons_that_differ_in_numbers_are_one_group() -> None:
    shown = noted("no answer from port 8000 in 2.5 s", "other", "no answer from port 80 in 12.0 s")
    first, second = shown.shown()["groups"]
    assert (first["why"], first["count"], first["id"]) == (
        "no answer from port N in N.N s",
        2,
        "id-2",
    )
    assert (second["why"], second["count"]) == ("other", 1)
    assert first["first"] < second["last"] < first["last"]


def test_what_failed_in_part_has_a_reason_of_ours() -> None:
    failures = Failures()
    fine, retried, moved = (Record("other", name) for name in ("fine", "retried", "moved"))
    retried.retries = moved.retries = moved.migrations = 1
    for record in (fine, retried, moved):
        failures.note(200, record, None)
    groups = failures.shown()["groups"]
    assert [(one["why"], one["id"]) for one in groups] == [
        ("stream moved", "moved"),
        ("retried", "retried"),
    ]
    assert [one["why"] for one in open_part(failures.shown())["groups"]] == [
        "stream moved",
        "retried",
    ]


def test_memory_is_bounded() -> None:
    letters = [chr(ord("a") + n % 26) * (1 + n // 26) for n in range(200)]
    shown = noted(*letters, "x" * 10_000, letters[-1]).shown()
    assert len(shown["groups"]) == len(shown["latest"]) == 50
    assert shown["groups"][0]["why"] == letters[-1]
    assert shown["groups"][0]["count"] == 2
    assert len(shown["groups"][1]["why"]) == 200


def test_several_processes_as_one() -> None:
    one, other = noted("down", "down", "one"), noted("other", "down")
    shown = merged([one.shown(), other.shown()])
    assert [(group["why"], group["count"]) for group in shown["groups"]] == [
        ("down", 3),
        ("other", 1),
        ("one", 1),
    ]
    assert shown["groups"][0]["id"] == "id-1"
    times = [failure["at"] for failure in shown["latest"]]
    assert len(times) == 5
    assert times == sorted(times, reverse=True)
    assert merged([]) == {"latest": [], "groups": []}


def test_without_a_key_groups_have_statuses_only() -> None:
    (group,) = open_part(noted("evil 1", "evil two").shown())["groups"]
    assert (group["status"], group["count"]) == (503, 2)
    assert not {"why", "id"} & set(group)
