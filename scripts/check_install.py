"""Test the built distributions as a new user would install them.

    python scripts/check_install.py dist

The wheels are installed into a fresh virtual environment: the plugin alone calibrates a folder and
names the absent suites, then the bundled pools work. An editable install sees changes of `config/`.
Needs only Python. PIP_ARGS is passed to pip.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRY_RUN = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8", "dry_run=true")
BUNDLED = ("method=featcal", "modelpool=clip-vit-mini_TA6")
PLUGIN, SUITES = "fusion_bench_featcal", "fusion_bench_featcal_suites"
HYDRA_PLUGIN = f"hydra_plugins/{PLUGIN}/__init__.py"
MOST_MB = {PLUGIN: 1, SUITES: 90}
EXAMPLE_ADDRESS = re.compile(rb"https?://[\w.-]*\bexample\.(?:com|net|org)[^\s\"')>\]]*")
FOLDERS = """
import json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<unk>", "</s>", *"abcdefghij"]
tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
options = dict(unk_token="<unk>", eos_token="</s>", pad_token="</s>")
sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
special = dict(bos_token_id=1, eos_token_id=1, pad_token_id=1)
for name in ("base", "one", "two"):
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, **special)).save_pretrained(name)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(name)
    rows = [dict(prompt=f"{a} {b}", target=a) for a in words[2:] for b in words[2:]]
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)
"""
CALIBRATION = (
    "calibrate", "--merge", "task_arithmetic:0.3", "--base", "base",
    "--expert", "one=one", "--expert", "two=two",
    "--data", "one=one.jsonl", "--data", "two=two.jsonl", "--out", "repaired",
)  # fmt: skip


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """Run a command and return its output. Exit with the output if it does not end as expected."""
    process = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )
    if bool(process.returncode) != fails:
        end = "ended well" if fails else "failed"
        sys.exit(f"{shlex.join(map(str, command))} {end} in {cwd}:\n{process.stdout}")
    return process.stdout


def check_wheel(wheel: Path, package: Path, *more: str) -> None:
    """Check that a wheel has its package's files, `more`, the licences, and no other package."""
    name = package.name
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    info = wheel.name.rsplit("-", 3)[0] + ".dist-info"
    files = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    expected = {str(p.relative_to(package.parent)) for p in files if "_hydra_plugin" not in p.parts}
    texts = [package.parent / "LICENSE", *package.parent.glob("LICENSES/*.txt")]
    expected |= {f"{info}/licenses/{p.relative_to(package.parent)}" for p in texts}
    expected |= set(more)
    if expected - packed:
        sys.exit(f"{wheel.name} lacks {sorted(expected - packed)}")
    foreign = {file for file in packed - set(more) if file.split("/")[0] not in (name, info)}
    if foreign:
        sys.exit(f"{wheel.name} must not have {sorted(foreign)}")
    if wheel.stat().st_size > MOST_MB[name] * 2**20:
        sys.exit(f"{wheel.name} is larger than {MOST_MB[name]} MB")


def check_sdist(sdist: Path) -> None:
    """Check that an sdist can build and test the package, and its addresses."""
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member for member in archive if member.isfile()}
        for name, member in files.items():
            content = archive.extractfile(member)
            check_addresses(f"{sdist.name}, {name}", content.read() if content else b"")
    needed = {"pyproject.toml", "README.md", "LICENSE", "config", "scripts", "tests", "Makefile"}
    lacking = needed - {name.split("/")[0] for name in files}
    if lacking:
        sys.exit(f"{sdist.name} lacks {sorted(lacking)}")


def check_addresses(place: str, content: bytes) -> None:
    """Check that no example address is published."""
    if address := EXAMPLE_ADDRESS.search(content):
        sys.exit(f"{place} has the address {address[0].decode()}")


def check_plugin_alone(bin_folder: Path, scratch: Path) -> None:
    """Check that the plugin composes, calibrates a folder and names the absent suites."""
    empty, configured = scratch / "empty", scratch / "own"
    empty.mkdir()
    (configured / "config" / "method").mkdir(parents=True)
    (configured / "config" / "method" / "mine.yaml").write_text("_target_: nothing.here\n")
    for folder in (empty, configured):
        printed = run(bin_folder / "fusion_bench", *DRY_RUN, cwd=folder)
        if "FeatCalAlgorithm" not in printed or "default_taskpool" not in printed:
            sys.exit(f"the dry run in {folder} composed something else:\n{printed}")
    absent = (
        run(bin_folder / "featcal", "suite", "path", cwd=empty, fails=True),
        run(bin_folder / "fusion_bench", *BUNDLED, cwd=empty, fails=True),
    )
    for printed in absent:
        if "pip install ./suites" not in " ".join(printed.split()):
            sys.exit(f"the absent suites are not named:\n{printed}")
    run(bin_folder / "python", "-c", FOLDERS, cwd=empty)
    printed = run(bin_folder / "featcal", *CALIBRATION, cwd=empty)
    if "featcal_plus" not in printed or not (empty / "repaired" / "model.safetensors").is_file():
        sys.exit(f"the plugin alone calibrated no folder:\n{printed}")
    check_foreign_program(bin_folder, scratch / "foreign")


def check_suites(bin_folder: Path, scratch: Path) -> None:
    """Check that a bundled pool composes, and that a copy of examples/own_task begins."""
    run(bin_folder / "fusion_bench", *BUNDLED, "--cfg", "job", "--resolve", cwd=scratch / "empty")
    folder = scratch / "example"
    shutil.copytree(ROOT / "examples" / "own_task", folder)
    run(bin_folder / "python", "make_task.py", "my_alphabet", cwd=folder)
    words = ("method=featcal", "modelpool=my_pool", "dry_run=true")
    composed = run(bin_folder / "fusion_bench", *words, cwd=folder)
    if "my_alphabet/expert" not in composed:
        sys.exit(f"the example own_task composes something else:\n{composed}")


def check_foreign_program(bin_folder: Path, folder: Path) -> None:
    """Check that another Hydra program of the environment does not find our configs."""
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "app.yaml").write_text("size: 1\n")
    (folder / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base=None, config_path='config', config_name='app')\n"
        "def main(config): pass\n"
        "main()\n"
    )
    printed = run(bin_folder / "python", "app.py", "--info", "searchpath", cwd=folder)
    if "fusion_bench" in printed:
        sys.exit(f"another Hydra program sees our configs:\n{printed}")


def check_editable(bin_folder: Path, tree: Path, empty: Path) -> None:
    """Check that a changed YAML of the source tree takes effect at once."""
    pool = tree / "config" / "modelpool" / "clip-vit-base-patch32_TA8.yaml"
    pool.write_text(pool.read_text() + "added_by_hand: 4711\n")
    command = [bin_folder / "fusion_bench", *DRY_RUN, "--cfg", "job", "--package", "modelpool"]
    if "added_by_hand: 4711" not in run(*command, cwd=empty):
        sys.exit("an editable install does not see a change of the source tree's config/")


def main() -> None:
    """Check the archives in the folder named on the command line."""
    dist = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    wheels = {name: next(dist.glob(f"{name}-*.whl")) for name in (PLUGIN, SUITES)}
    (sdist,) = dist.glob("*.tar.gz")
    configs = (f"{PLUGIN}/{p.relative_to(ROOT)}" for p in ROOT.glob("config/**/*.yaml"))
    check_wheel(wheels[PLUGIN], ROOT / PLUGIN, HYDRA_PLUGIN, *configs)
    check_wheel(wheels[SUITES], ROOT / "suites" / SUITES)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        bin_folder = scratch / "venv" / "bin"
        run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        constraints = ("--constraint", ROOT / "constraints/default.txt")
        install = [bin_folder / "python", "-m", "pip", "install", "--no-compile", *constraints]
        install += shlex.split(os.environ.get("PIP_ARGS", ""))
        run(*install, wheels[PLUGIN], cwd=scratch)
        check_plugin_alone(bin_folder, scratch)
        print(f"{wheels[PLUGIN].name}: composes, and calibrates a folder", flush=True)
        run(*install, wheels[SUITES], cwd=scratch)
        check_suites(bin_folder, scratch)
        print(f"{wheels[SUITES].name}: the bundled pools compose", flush=True)
        shutil.unpack_archive(sdist, scratch / "tree", filter="data")
        (tree,) = (scratch / "tree").iterdir()
        run(*install, "--no-deps", "--editable", tree, cwd=scratch)
        check_editable(bin_folder, tree, scratch / "empty")
        print(f"{sdist.name}: an editable install sees changes", flush=True)


if __name__ == "__main__":
    main()
