"""Published averages are found by the names that the comparison gives its rows."""

import pytest

from fusion_bench_featcal.compare.published import published_average

B32 = "clip-vit-base-patch32_TA8"


@pytest.mark.parametrize(
    ("upstream", "name", "value"),
    [
        ("task_arithmetic", "base", 0.482),
        ("wudi", "experts", 0.903),
        ("task_arithmetic", "task_arithmetic", 0.675),
        ("simple_average", "surgery", 0.773),
        ("adamerging", "prob_surgery", 0.859),
        ("wudi", "featcal", 0.888),
    ],
)
def test_averages_of_the_main_table(upstream: str, name: str, value: float) -> None:
    published = published_average(B32, upstream, name)
    assert published is not None
    assert published.value == pytest.approx(value)
    assert (published.source, published.note) == ("Table 1", "")


@pytest.mark.parametrize(
    ("suite", "upstream", "name"),
    [
        ("clip-vit-mini_TA6", "wudi", "featcal"),
        (B32, "wudi", "featcal:mini"),
        (B32, "ties_merging", "ties_merging"),
        (B32, "wudi", "anchor_only"),
        (B32, None, "featcal"),
    ],
)
def test_rows_that_the_paper_lacks_have_none(suite: str, upstream: str | None, name: str) -> None:
    assert published_average(suite, upstream, name) is None


def test_doubtful_entry_has_its_note() -> None:
    published = published_average("clip-vit-base-patch32_TALL20", "simple_average", "featcal")
    assert published is not None
    assert published.value == pytest.approx(0.7315)
    assert "prints 87.3" in published.note
