"""Files of a merged model that a calibration does not write come along, but no code or weights."""

import re
from pathlib import Path

import pytest
import transformers
from made_folders import words
from reports import error_of, featcal
from tiny_texts import WORDS, word_tokenizer

from fusion_bench_featcal.models import folder_files
from fusion_bench_featcal.models.folder_files import FolderFiles

KEPT = {"LICENSE", "NOTICE.md", "notes.txt", "args_config.json", "list_config.json", "card.png"}
TOKENIZER = {"tokenizer.model", "special_tokens_map.json", "preprocessor_config.json"}
NEVER = {
    "modeling_x.py", "old.bin", "model.onnx", "model.gguf", "tf_model.h5", "flax_model.msgpack",
    "rust_model.ot", "optimizer.pt", "rng_state_0.pth", "model.fp16.SAFETENSORS", ".gitattributes",
    "trainer_state.json", "featcal/old.json",
}  # fmt: skip


def write(folder: Path, names: set[str], text: str = "{}") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def names_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_folders_of_models_keep_small_files(folder):
    """Files of a tokenizer from elsewhere come from there."""
    write(folder / "merged", KEPT | TOKENIZER | NEVER | {"README.md", "recipe.yaml", "docs/use.md"})
    (folder / "merged" / "list_config.json").write_text("[1")  # another program's
    done = featcal(*words(folder, "--no-eval"))
    assert done.code == 0, done.err
    beside = "model.gguf, model.onnx, old.bin, rust_model.ot, tf_model.h5"
    assert f"other weights in {folder / 'merged'} are neither repaired nor copied: flax_mo" in (
        " ".join(done.out.split())
    )
    assert beside in done.out
    new = names_in(folder / "out")
    assert new >= KEPT | TOKENIZER and new.isdisjoint(NEVER)
    assert all(
        (folder / "out" / name).read_text() == "{}"
        for name in (KEPT | TOKENIZER) - {"list_config.json"}
    )
    assert all((folder / "out" / name).read_text() != "{}" for name in ("README.md", "recipe.yaml"))
    word_tokenizer(words=WORDS).save_pretrained(folder / "other")
    write(folder / "other", {"vocab.txt", "NOT_OF_A_TOKENIZER"})
    more = ("--tokenizer", str(folder / "other"), "--out", str(folder / "new"))
    done = featcal(*words(folder, "--no-eval", *more))
    assert done.code == 0, done.err
    new = names_in(folder / "new")
    assert KEPT | {"vocab.txt"} <= new
    is_release_4 = transformers.__version__.startswith("4.")
    written = {"special_tokens_map.json"} if is_release_4 else set()  # by the library
    assert new.isdisjoint((NEVER | TOKENIZER | {"NOT_OF_A_TOKENIZER"}) - written)


@pytest.mark.parametrize("has_code", [False, True])
def test_subfolders_code_and_large_files(tmp_path, monkeypatch, has_code):
    monkeypatch.setattr(folder_files, "_LARGEST", 5)
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, KEPT | NEVER | {"1_Pooling/old.txt", ".cache/x", "docs/use.md"})
    write(source, {"model.safetensors.index.json"}, '{"weight_map": {}}')
    write(source, {"huge.json"}, "too large")
    write(target, {"LICENSE"}, "its own")
    skipped = {"1_Pooling"}
    FolderFiles(source).copy_small_files(target, skipped_folders=skipped, has_code=has_code)
    code = {"modeling_x.py"} if has_code else set()
    assert names_in(target) == KEPT | {"docs/use.md"} | code
    assert (target / "LICENSE").read_text() == "its own"


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "chat_template.jinja", "config.json"])
def test_links_out_of_a_model_are_refused_before_anything_runs(folder, name):
    """Their content would become part of a model that is uploaded."""
    private, merged = folder / "private", folder / "merged"
    private.write_text((merged / name).read_text() if (merged / name).exists() else "a secret")
    (merged / name).unlink(missing_ok=True)
    (merged / name).symlink_to("../private")
    message = error_of(*words(folder, "--no-eval"))
    assert f"merged/{name} links to {private}" in message
    assert not (folder / "out").exists() and not (folder / "out.blocks").exists()


@pytest.mark.parametrize("is_folder", [False, True])
def test_links_out_of_folders_inside_a_model_are_refused(folder, is_folder):
    """transformers would save the text of a key as a chat template."""
    private, templates = folder / "private", folder / "merged" / "additional_chat_templates"
    write(private, {"key.jinja"}, "a secret")
    if is_folder:
        templates.symlink_to("../private")
    else:
        templates.mkdir()
        (templates / "key.jinja").symlink_to("../../private/key.jinja")
    name = templates.name + ("" if is_folder else "/key.jinja")
    line = error_of(*words(folder, "--no-eval"))
    assert re.search(rf"merged/{name} links to .*, outside its folder", line)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("folder_name", "blobs"), [("snapshots", ""), ("saved", "blobs")])
def test_a_folder_like_the_hubs_cache_has_no_more_rights(tmp_path, folder_name, blobs):
    """The cache has `blobs` beside `snapshots`, and links lead to no other place."""
    model = tmp_path / folder_name / "model"
    write(model, {"config.json"})
    write(tmp_path / "blobs" if blobs else tmp_path, {"key"}, "a secret")
    (model / "notes.txt").symlink_to(tmp_path / blobs / "key")
    with pytest.raises(ValueError, match=r"notes\.txt links to .*, outside its folder"):
        FolderFiles(model).small_files()


def test_links_in_a_model_and_in_the_hubs_cache_are_followed(tmp_path):
    cached, target = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "target"
    write(tmp_path / "models--a--b" / "blobs", {"aa11"}, "of the hub")
    write(cached, {"notes.txt"}, "its own")
    (cached / "LICENSE").symlink_to("../../blobs/aa11")
    (cached / "linked.md").symlink_to("notes.txt")
    (cached / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    FolderFiles(cached).copy_small_files(target)
    assert {name: (target / name).read_text() for name in names_in(target)} == {
        "LICENSE": "of the hub", "linked.md": "its own", "notes.txt": "its own",
    }  # fmt: skip
    write(tmp_path, {"private"})
    (cached / "docs").mkdir()
    (cached / "docs" / "use.md").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match=r"docs/use\.md links to .*, outside its folder"):
        FolderFiles(cached).copy_small_files(target, skipped_folders=())
    (cached / "docs" / "use.md").unlink()
    (cached / "key.txt").symlink_to(tmp_path / "models--a--b" / "key")
    write(tmp_path / "models--a--b", {"key"})
    with pytest.raises(ValueError, match=r"key\.txt links to .*, outside its folder"):
        FolderFiles(cached).copy_small_files(target)


def test_a_model_and_its_blocks_go_where_links_lead(folder):
    for name in ("out", "out.blocks"):
        (folder / name).symlink_to(f"elsewhere/new-{name}")
    done = featcal(*words(folder, "--no-eval"))
    assert done.code == 0, done.err
    assert (folder / "elsewhere" / "new-out" / "model.safetensors").is_file()
    assert [path.name for path in (folder / "elsewhere").iterdir()] == ["new-out"]
    (folder / "loop").symlink_to("loop")
    message = error_of(*words(folder, "--out", str(folder / "loop")))
    assert message.startswith(f"--out {folder}/loop exists")
