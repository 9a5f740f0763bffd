"""Origin of a saved model: experts, reads and digests beside it, and the command that shows it."""

import hashlib
import json
from pathlib import Path

import pytest
from golden import golden_methods
from reports import featcal
from safetensors.torch import load_file

from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.results import Provenance, ReportError
from fusion_bench_featcal.suites import image


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a saved model and of its run."""
    folder = tmp_path_factory.mktemp("run")
    words = ("method.samples_per_task=2", "method.expert_read_budget=11MB")
    golden_methods.run_method("featcal", folder, *words)
    return folder / "saved", folder / "log"


def test_digests_are_those_of_the_weights_that_were_read(saved: tuple[Path, Path]):
    content = json.loads((saved[0] / "provenance.json").read_text())
    hashes = content["reads"]["hashes"]
    for task, omitted in content["reads"]["plan"]["omitted"].items():
        weights = load_file(Path(image.path(task)) / "model.safetensors")
        read = hashes["models"][task]["tensors"]
        assert read == {name: digest_tensor(weights[name]) for name in sorted(read)}
        # Files may have a prefix that the model's names lack (transformers 5).
        left_out = {n for n in weights if n.rpartition(".")[0].endswith(tuple(omitted))}
        assert left_out and not left_out & set(read)
        assert {n for n in weights if ".layers." in n} - left_out <= set(read)
    for name, digest in content["files"].items():
        assert digest == hashlib.sha256((saved[0] / name).read_bytes()).hexdigest()
    files = {path.name for path in saved[0].iterdir()}
    assert set(content["files"]) == files - {"README.md", "provenance.json"}


def test_explanation_says_whose_weights_each_module_was_made_from(saved: tuple[Path, Path]):
    provenance = {folder: Provenance.find(folder) for folder in saved}
    assert provenance[saved[0]].experts_of() == provenance[saved[1]].experts_of()
    omitted = provenance[saved[0]].reads["plan"]["omitted"]
    for modules in provenance[saved[0]].experts_of().values():
        for module, experts in modules.items():
            for expert, whose in experts.items():
                assert whose == ("merged" if module in omitted[expert] else "own")
    done = featcal("explain", saved[0])
    assert done.code == 0 and "layers.0 (8 modules)" in done.out
    assert "merged by task_arithmetic, which read the models by itself" in done.out
    assert "budget 11MB, in forward order" in done.out
    assert "files of the model: as they were written" in done.out
    content = json.loads(featcal("explain", saved[1], "--json").out)
    assert content["experts_of"] == provenance[saved[1]].experts_of()


def test_changed_files_are_found_and_folders_without_an_origin_refused(
    saved: tuple[Path, Path], tmp_path: Path
):
    with pytest.raises(ReportError, match="give the folder of a saved model or the log directory"):
        Provenance.find(tmp_path)
    with pytest.raises(ReportError, match=r"no reads.plus.json.*--preset for one of reads.json"):
        Provenance.find(saved[1], "plus")
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").unlink()
    done = featcal("explain", tmp_path)
    assert done.code == 1 and "changed since: config.json, model.safetensors" in done.out
