"""A field's annotation and declaration say which values a setting accepts."""

import dataclasses
from typing import Any

import pytest

from fusion_bench_featcal.setting_fields import (
    Settings,
    accepted_values,
    same_as,
    setting,
    settings_of,
    shared_part,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parent(Settings):
    flag: bool = setting(True, "A flag.")
    count: int = setting(3, "A number of things.", ge=1)
    share: float = setting(0.5, "A share.", ge=0, le=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Child(Parent):
    step: float | str = setting("auto", "A step.", gt=0, choices=("auto",))
    kind: str = setting("a", "A kind.", choices=("a", "b"))
    text: str | None = setting(None, "A text.", accepts="a name")
    switch: bool | str = setting("auto", "A switch.", choices=("auto", False))
    pair: Any = setting((), "A pair.", accepts="a pair", check=lambda value: len(value) in (0, 2))
    anything: Any = setting(None, "Checked elsewhere.", accepts="anything")
    state: dict[str, int] = dataclasses.field(default_factory=dict, init=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other(Settings):
    count: int = same_as(Parent, "count", help="A number of others.")
    kind: str = setting("c", "Another kind.", choices=("c", "d"))


FIELDS = {field.name: field for field in settings_of(Child)}


def test_own_settings_come_before_inherited_ones_and_state_is_none():
    own = ["step", "kind", "text", "switch", "pair", "anything"]
    assert list(FIELDS) == [*own, "flag", "count", "share"]


@pytest.mark.parametrize(
    ("name", "words", "accepted", "refused"),
    [
        ("flag", "true or false", [False], [0, 1, None, "true"]),
        ("count", "an integer >= 1", [1], [0, 1.0, True, None, "1"]),
        ("share", "a finite number >= 0 and at most 1", [0, 1, 0.1], [1.1, -1, float("nan"), True]),
        ("step", "auto or a finite number > 0", ["auto", 1e-9], [0, "Auto", float("inf"), None]),
        ("kind", "one of a, b", ["b"], ["c", "", None]),
        ("text", "null or a name", [None, "x"], ["", 3]),
        ("switch", "one of auto, false", [False, "auto"], [True, 0, "false"]),
        ("pair", "a pair", [(1, 2)], [(1,)]),
        ("anything", "anything", [3, None, "x"], []),
    ],
)
def test_accepted_values(name: str, words: str, accepted: list[Any], refused: list[Any]):
    assert accepted_values(FIELDS[name]) == words
    for value in accepted:
        assert getattr(Child(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"^method\.{name} must be {words}, got "):
            Child(**{name: value})


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"^method\.kind must .*; method\.count must "):
        Child(count=0, kind="c")


def test_settings_in_common_are_handed_on():
    assert shared_part(Other(count=7), Parent, flag=False) == Parent(count=7, flag=False)
    assert Other.count == 3
