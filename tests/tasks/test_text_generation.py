"""Exact match and rank correlation against known answers."""

import pytest

from fusion_bench_featcal.tasks.text_generation import exact_matches, spearman


def test_exact_match_overlooks_blanks_at_the_ends_only():
    answers = ["PLAY MUSIC", " PLAY MUSIC\n", "PLAY  MUSIC", "play music", "PLAY", ""]
    assert exact_matches(answers, ["PLAY MUSIC"] * 6) == [True, True, False, False, False, False]
    with pytest.raises(ValueError):
        exact_matches(["a"], [])


def test_spearman_of_known_answers():
    assert spearman(["1", "2.5", "9"], ["0.1", "0.2", "0.3"]) == pytest.approx(1)
    assert spearman(["9", "2.5", "1"], ["0.1", "0.2", "0.3"]) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman(["0", "3", "3", "5"], ["1", "3", "2", "4"]) == pytest.approx((4.5 / 5) ** 0.5)


@pytest.mark.parametrize("word", ["great", "", "nan", "inf", "1,5"])
def test_an_answer_that_is_no_number_counts_as_zero(word):
    targets = ["1", "2", "3"]
    assert spearman([word, "1", "2"], targets) == pytest.approx(1)
    assert spearman(["1", "2", word], targets) == spearman(["1", "2", "0"], targets)


def test_constant_answers_have_no_correlation():
    assert spearman(["2", "2", "2"], ["1", "2", "3"]) == 0
