"""The base that experts' cards and configs name."""

import json
from pathlib import Path

import pytest

from fusion_bench_featcal.models.bases import bases_of, without_base

CARD = "---\nbase_model:\n- org/base\n- org/other\n---\n# An expert\n"


def expert(folder: Path, *, card: str = "", config: str = "") -> str:
    folder.mkdir()
    if card:
        (folder / "README.md").write_text(card)
    (folder / "config.json").write_text(json.dumps({"_name_or_path": config} if config else {}))
    return str(folder)


def test_the_place_comes_before_cards_and_configs(tmp_path: Path) -> None:
    place = expert(tmp_path / "a", card=CARD, config="old/base")
    assert bases_of(place) == [place, "org/base", "org/other", "old/base"]
    assert bases_of("org/never-fetched") == ["org/never-fetched"]
    assert bases_of(str(tmp_path / "missing")) == [str(tmp_path / "missing")]


@pytest.mark.parametrize(("second", "hint"), [
    ({"card": CARD}, "The experts name it: --base org/base"),
    ({"config": "org/other"}, "The experts name it: --base org/other"),
    ({"config": "org/third"}, "fewer texts repair more"),
    ({"card": "---\nbase_model: 5\n---\n"}, "fewer texts repair more"),
    ({"card": "---\nbase_model: [\n---\n"}, "fewer texts repair more"),
    ({"card": "---\n- base_model\n---\n"}, "fewer texts repair more"),
])  # fmt: skip
def test_a_base_is_named_if_all_experts_name_it(tmp_path: Path, second: dict[str, str], hint: str):
    places = [expert(tmp_path / "a", card=CARD), expert(tmp_path / "b", **second)]
    assert without_base(places, "--base {}").endswith(hint)


def test_one_place_of_all_experts_is_their_base(tmp_path: Path) -> None:
    """Models of one place that differ were trained since. A single one may be as it was."""
    place = expert(tmp_path / "base", card=CARD)
    assert without_base([place, place], "base={!r}").endswith(f"base={place!r}")
    assert without_base([place], "base={!r}").endswith("fewer texts repair more")
