"""Labels of datasets and configured class names: matched by name or in order, never swapped."""

import numpy as np
import pytest
import torch

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.labels import encode_labels, label_index, match_names

TWELVE = sorted(str(number) for number in range(12))


@pytest.mark.parametrize(
    ("found", "wanted", "by", "expected"),
    [
        (["b", "a"], ["a", "b", "c"], "name", [1, 0]),  # all known
        (["n01", "n02"], ["cat", "dog"], "order", [0, 1]),  # all unknown
        (["n01", "n02"], ["cat", "dog"], "either", [0, 1]),
        (["b", "a"], ["a", "b"], "order", [0, 1]),  # order goes before names
        (["b", "a"], ["a", "b"], "either", [1, 0]),
        (
            ["cat", "dog", "x"],
            ["dog", "cat", "y"],
            "either",
            [0, 1, 2],
        ),  # as FusionBench takes them
        (TWELVE, [f"class {n}" for n in range(12)], "name", [int(name) for name in TWELVE]),
        (["00", "02"], ["a", "b", "c"], "name", [0, 2]),  # numbers from zero are positions
        (["crane", "crane"], ["crane", "crane"], "name", [0, 1]),
    ],
)
def test_names_are_matched(found, wanted, by, expected):
    assert match_names(found, wanted, "here", by) == expected


@pytest.mark.parametrize(
    ("found", "wanted", "by", "message"),
    [
        (
            ["n01", "n02"],
            ["cat", "dog"],
            "name",
            r"2 classes .*'n02'\) and 2 .*do not match\. .*'n01'",
        ),
        (["1", "2"], ["a", "b"], "name", "No class name: '1'"),
        (["n01"], ["cat", "dog"], "order", "1 classes .* and 2 classnames"),
        (
            ["cat", "dog", "bird_"],
            ["dog", "cat", "bird"],
            "name",
            "3 classes .*nearest: 'bird'",
        ),
        (
            ["cat", "catt", "dog"],
            ["cat", "dog"],
            "name",
            "3 classes .* 2 classnames .*'catt' .*nearest: 'cat'",
        ),
    ],
)
def test_names_that_could_be_swapped_are_refused(found, wanted, by, message):
    with pytest.raises(ValueError, match=message):
        match_names(found, wanted, "here", by)


@pytest.mark.parametrize("value", [1, True, 1.0, np.int64(1), torch.tensor(1), "dog"])
def test_what_counts_as_label_one(value):
    assert label_index(value, ["cat", "dog"], "here") == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, r"item 3: label 2 is out of range \(0\.\.1"),
        (-1, r"item 3: label -1 is out of range \(0\.\.1"),
        (1.5, "neither an integer nor a class name"),
        (None, "neither an integer nor a class name"),
        (torch.tensor([1, 2]), "neither an integer nor a class name"),
        ("dogg", "'dogg' is none of the 2 class names.*'dog'"),
    ],
)
def test_what_is_no_label_is_named_with_its_item(value, message):
    with pytest.raises(CalibrationError, match=message):
        label_index(value, ["cat", "dog"], "data 'x', item 3")


@pytest.mark.parametrize(
    ("values", "names", "classnames", "expected"),
    [
        (["b", "a", "b"], None, None, ([1, 0, 1], ["a", "b"])),
        (["b", "a"], None, ["b", "c", "a"], ([0, 2], ["b", "c", "a"])),
        (["10", "9"], None, None, ([1, 0], ["9", "10"])),
        (["1", "0"], None, ["cat", "dog"], ([1, 0], ["cat", "dog"])),
        ([0, 1], ["x", "y"], ["y", "x"], ([1, 0], ["y", "x"])),
        ([0, 4], None, None, ([0, 4], None)),
    ],
)
def test_a_column_of_labels(values, names, classnames, expected):
    assert encode_labels(values, names, classnames, "here") == expected
