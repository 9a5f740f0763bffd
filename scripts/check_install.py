"""Test the built sdist and wheel, and an editable install, as a new user would.

    python scripts/check_install.py dist

Each of the three is installed into one fresh virtual environment (dependencies only once) and must
then compose the literal command of the README from an empty folder and from a folder with a
`config`, copy an example and start it, and leave another Hydra program unchanged. Needs only
Python. PIP_ARGS is passed to pip.
"""

import os
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
PLUGIN = "hydra_plugins/fusion_bench_featcal/__init__.py"
MAX_WHEEL_MB = 80  # of which the image suite is about 35, the text suites 18, adapters 18


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output. If it fails, exit with the output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed in {cwd}:\n{done.stdout}")
    return done.stdout


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check that the wheel has all run-time files, and that the sdist can build and test it."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    package = ROOT / "fusion_bench_featcal"
    data = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    expected = {str(p.relative_to(ROOT)) for p in data if "_hydra_plugin" not in p.parts}
    expected |= {
        f"fusion_bench_featcal/{p.relative_to(ROOT)}" for p in ROOT.glob("config/**/*.yaml")
    }
    expected |= {PLUGIN}
    licences = wheel.name.rsplit("-", 3)[0] + ".dist-info/licenses"
    texts = [ROOT / "LICENSE", *ROOT.glob("LICENSES/*.txt")]
    expected |= {f"{licences}/{p.relative_to(ROOT)}" for p in texts}
    if expected - packed:
        sys.exit(f"{wheel.name} lacks {sorted(expected - packed)}")
    foreign = {name for name in packed if name.startswith("tests/")}
    foreign |= packed & {"hydra_plugins/__init__.py"}  # it would hide every other Hydra plugin
    if foreign:
        sys.exit(f"{wheel.name} must not hold {sorted(foreign)}")
    if wheel.stat().st_size > MAX_WHEEL_MB * 2**20:
        sys.exit(f"{wheel.name} is larger than {MAX_WHEEL_MB} MB")
    with tarfile.open(sdist) as archive:
        unpacked = {name.split("/")[1] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "config", "scripts", "tests", "Makefile"}
    lacking = needed - unpacked
    if lacking:
        sys.exit(f"{sdist.name} lacks {sorted(lacking)}")


def check_commands(bin_folder: Path, scratch: Path) -> None:
    """The literal command composes in an empty folder and in one with a foreign `config`."""
    empty, with_config = scratch / "empty", scratch / "own"
    empty.mkdir(exist_ok=True)
    (with_config / "config" / "method").mkdir(parents=True, exist_ok=True)
    (with_config / "config" / "method" / "mine.yaml").write_text("_target_: nothing.here\n")
    for folder in (empty, with_config):
        printed = run(bin_folder / "fusion_bench", *DRY_RUN, cwd=folder)
        if "FeatCalAlgorithm" not in printed or "default_taskpool" not in printed:
            sys.exit(f"the dry run in {folder} composed something else:\n{printed}")
    run(bin_folder / "featcal", "--help", cwd=empty)
    run(bin_folder / "featcal", "suite", "path", cwd=empty)
    check_example(bin_folder, scratch / "example")
    check_foreign_program(bin_folder, scratch / "foreign")


def check_example(bin_folder: Path, folder: Path) -> None:
    """Check that a copy of examples/own_task runs up to its calibration."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "examples" / "own_task", folder)
    run(bin_folder / "python", "make_task.py", "my_alphabet", cwd=folder)
    words = ("method=featcal", "modelpool=my_pool", "dry_run=true")
    composed = run(bin_folder / "fusion_bench", *words, cwd=folder)
    if "my_alphabet/expert" not in composed:
        sys.exit(f"the example own-task composes something else:\n{composed}")


def check_foreign_program(bin_folder: Path, folder: Path) -> None:
    """Check that another Hydra program of the environment does not find our configs."""
    (folder / "config").mkdir(parents=True, exist_ok=True)
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
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        bin_folder = scratch / "venv" / "bin"
        run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
        constraints = ("--constraint", ROOT / "constraints/default.txt")
        install = [bin_folder / "python", "-m", "pip", "install", *constraints]
        install += shlex.split(os.environ.get("PIP_ARGS", ""))
        tree = scratch / "tree"
        shutil.unpack_archive(sdist, tree, filter="data")
        (tree,) = tree.iterdir()
        for source in ((wheel,), (sdist,), ("--editable", tree)):
            run(*install, *source, cwd=scratch)
            check_commands(bin_folder, scratch)
            print(f"{Path(source[-1]).name}: installs and composes", flush=True)
            if source[0] == "--editable":
                check_editable(bin_folder, tree, scratch / "empty")
            else:
                run(bin_folder / "pip", "uninstall", "-y", "fusion_bench_featcal", cwd=scratch)


if __name__ == "__main__":
    main()
