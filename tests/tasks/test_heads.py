"""Class names in FusionBench's table: never replaced unnoticed; stored heads: never stale."""

import logging

import lightning
import pytest
import torch
from fusion_bench.mixins.clip_classification import CLIPClassificationMixin
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory, get_classnames_and_templates
from fusion_bench.utils import cache_utils

from fusion_bench_featcal.tasks.heads import (
    PromptTemplate,
    forget_stored_heads,
    known_names,
    register_names,
)

DIGITS = [str(digit) for digit in range(10)]


def test_registered_names_are_what_fusion_bench_finds_and_known_ones_are_those_of_others():
    register_names("shapes", ["circle", "star"], [PromptTemplate("a drawing of a {}")])
    classnames, templates = get_classnames_and_templates("shapes")
    assert classnames == ["circle", "star"]
    assert [template("star") for template in templates] == ["a drawing of a star"]
    register_names("things", ["circle"], None)
    assert get_classnames_and_templates("things")[1][0]("circle") == "a photo of a circle."
    assert known_names("shapes") is None and known_names("nothing") is None
    known = known_names("mnist")
    assert known is not None and known[0] == DIGITS


@pytest.mark.parametrize("classnames", [["zero", *DIGITS[1:]], DIGITS[:9], [*DIGITS, "ten"]])
def test_other_names_than_fusion_benchs_are_refused(classnames):
    with pytest.raises(ValueError, match=r"tasks\.mnist\.classnames: .*'my_mnist'"):
        register_names("mnist", classnames, None)
    assert get_classnames_and_templates("mnist")[0] == DIGITS


def test_own_names_may_change_with_a_warning(caplog):
    register_names("shapes", ["circle"], None)
    with caplog.at_level(logging.WARNING):
        register_names("shapes", ["circle"], None)
        assert caplog.messages == []
        register_names("shapes", ["disc"], None)
    assert "'shapes'" in caplog.messages[0]
    assert CLIPTemplateFactory.get_classnames_and_templates("shapes")[0] == ["disc"]


class StoredHeads(CLIPClassificationMixin):
    """FusionBench's way to heads, through its cache on disk."""

    def __init__(self) -> None:
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def head(self, task: str, processor, clip_model) -> torch.Tensor:
        self.setup_zero_shot_classification_head(processor, clip_model, [task])
        return self.zeroshot_weights[task]


def test_new_class_names_give_a_new_head(make_pool, shapes):
    def head(templates: str, task: str = "shapes") -> torch.Tensor:
        pool = make_pool(tasks={task: {"data": str(shapes), "templates": templates}})
        pool.setup()
        return StoredHeads().head(task, pool.processor, pool.clip_model)

    first = head("a drawing of a {}")
    assert torch.equal(head("a drawing of a {}"), first)
    assert not torch.allclose(head("a photo of a {}"), first)


def test_only_the_named_tasks_heads_are_forgotten(make_pool, shapes):
    names = ("ours", "theirs")
    pool = make_pool(tasks={name: {"data": str(shapes)} for name in names})
    pool.setup()
    heads = StoredHeads()
    for name in names:
        heads.head(name, pool.processor, pool.clip_model)
    assert len(list(cache_utils.DEFAULT_CACHE_DIR.rglob("metadata.json"))) == 2
    assert forget_stored_heads(["ours", "unheard of"]) == 1
    (left,) = cache_utils.DEFAULT_CACHE_DIR.rglob("metadata.json")
    assert "theirs" in left.read_text()
    assert forget_stored_heads(["ours"]) == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"input_args": 3}',
        b'{"input_args": {"task": 3}}',
        b'{"input_args": {"task": "\'shapez\'"}}',
    ],
)
def test_heads_with_a_damaged_note_are_made_anew(make_pool, shapes, damage):
    tasks = {"shapes": {"data": str(shapes)}}
    pool = make_pool(tasks=tasks)
    pool.setup()
    first = StoredHeads().head("shapes", pool.processor, pool.clip_model)
    (note,) = cache_utils.DEFAULT_CACHE_DIR.rglob("metadata.json")
    note.write_bytes(damage)
    make_pool(tasks=tasks)
    assert not note.parent.exists()
    assert torch.equal(StoredHeads().head("shapes", pool.processor, pool.clip_model), first)
