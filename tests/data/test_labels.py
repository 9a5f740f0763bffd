"""Labels of data sets and configured class names: matched by name or in order, never swapped."""

import numpy as np
import pytest
import torch

from fusion_bench_featcal.data.labels import encode_labels, label_index, match_names
from fusion_bench_featcal.settings import CalibrationError


def test_names_that_are_all_known_are_matched_by_name():
    assert match_names(["b", "a"], ["a", "b", "c"], "here") == [1, 0]


def test_names_that_are_all_unknown_are_taken_in_order_only_when_told():
    for by in ("order", "either"):
        assert match_names(["n01", "n02"], ["cat", "dog"], "here", by) == [0, 1]
    with pytest.raises(ValueError, match=r"'n01', 'n02'\) and .*'cat', 'dog'\) share no name"):
        match_names(["n01", "n02"], ["cat", "dog"], "here")
    with pytest.raises(ValueError, match="2 class names for the 1"):
        match_names(["n01"], ["cat", "dog"], "here", "order")


def test_order_goes_before_names():
    assert match_names(["b", "a"], ["a", "b"], "here", "order") == [0, 1]
    assert match_names(["b", "a"], ["a", "b"], "here", "either") == [1, 0]


def test_numbers_from_zero_are_positions():
    found = [str(number) for number in range(12)]
    assert match_names(sorted(found), [f"class {n}" for n in range(12)], "here") == [
        int(name) for name in sorted(found)
    ]
    assert match_names(["00", "02"], ["a", "b", "c"], "here") == [0, 2]
    with pytest.raises(ValueError, match="share no name"):
        match_names(["1", "2"], ["a", "b"], "here")


def test_equal_lists_with_repeated_names_match_in_order():
    assert match_names(["crane", "crane"], ["crane", "crane"], "here") == [0, 1]


def test_names_at_other_places_are_refused_unless_all_are_known():
    with pytest.raises(ValueError, match=r"'cat' is label 0 in the data, but stands at 1"):
        match_names(["cat", "dog", "bird_"], ["dog", "cat", "bird"], "here")


def test_other_number_of_classes_names_the_stranger_and_its_neighbour():
    with pytest.raises(ValueError, match=r"2 class names for the 3 .*'catt' .*nearest: 'cat'"):
        match_names(["cat", "catt", "dog"], ["cat", "dog"], "here")


@pytest.mark.parametrize("value", [1, True, 1.0, np.int64(1), torch.tensor(1), "dog"])
def test_what_counts_as_label_one(value):
    assert label_index(value, ["cat", "dog"], "here") == 1


@pytest.mark.parametrize("value", [2, -1])
def test_label_out_of_range_names_the_item_and_the_range(value):
    with pytest.raises(CalibrationError, match=rf"item 3: label {value} is out of range \(0\.\.1"):
        label_index(value, ["cat", "dog"], "data 'x', item 3")


@pytest.mark.parametrize("value", [1.5, None, torch.tensor([1, 2])])
def test_what_is_no_label(value):
    with pytest.raises(CalibrationError, match="neither an integer nor a class name"):
        label_index(value, ["cat", "dog"], "here")


def test_misspelt_class_name_offers_the_nearest():
    with pytest.raises(CalibrationError, match=r"'dogg' is none of the 2 class names.*'dog'"):
        label_index("dogg", ["cat", "dog"], "here")


def test_texts_name_their_own_classes_in_alphabetical_order():
    assert encode_labels(["b", "a", "b"], None, None, "here") == ([1, 0, 1], ["a", "b"])


def test_texts_follow_the_configured_class_names():
    assert encode_labels(["b", "a"], None, ["b", "c", "a"], "here") == ([0, 2], ["b", "c", "a"])


def test_integers_with_names_of_their_own_are_renumbered_by_name():
    assert encode_labels([0, 1], ["x", "y"], ["y", "x"], "here") == ([1, 0], ["y", "x"])


def test_plain_integers_name_no_classes():
    assert encode_labels([0, 4], None, None, "here") == ([0, 4], None)
