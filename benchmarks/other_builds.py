"""FeatCal+ on further builds of the image suite: another seed, a wider and a deeper model.

    python benchmarks/other_builds.py --folder my_builds --samples 8 64 256 --seeds 42 43

trains base and experts of each build from the bundled data (10 to 30 minutes a build on one core,
unless they are in the folder), writes their model pools there and calibrates the merged model (task
arithmetic) with FeatCal+ and the paper's settings, none of which differs from those for the bundled
build. In the folder itself `fusion_bench method=... modelpool=clip-vit-mini_wide` runs any method.

    python benchmarks/other_builds.py --folder my_builds --compare

compares the methods of `method=compare` on these builds and the bundled one, 64 images a task, and
prints every row's difference from FeatCal+ with its interval over the four trainings.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import yaml
from plus import machine, presets, publish, run, table
from rich.console import Console
from rich.progress import track

from fusion_bench_featcal.results.against import averages_of
from fusion_bench_featcal.results.differences import over_suites, over_suites_grid
from fusion_bench_featcal.results.find import find
from fusion_bench_featcal.results.summary import summarise
from fusion_bench_featcal.suites import image

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "suites"))
from build_suite import BUILDERS, build
from clip_builder import ClipBuilder

# Build -> seed and size of the vision tower; the bundled one has seed 0, width 192 and depth 4.
SEEDS = {"seed": 1, "wide": 2, "deep": 3}
SIZES: dict[str, dict[str, int]] = {"seed": {}, "wide": {"width": 288}, "deep": {"depth": 6}}


def built(folder: Path, name: str) -> dict[str, Any]:
    """Train a build and write its pool, unless they are there; what was measured of it."""
    suite, place = f"clip-vit-mini_{name}", folder / f"clip-vit-mini_{name}"
    if not (place / "SHA256SUMS").is_file():
        recipe = ClipBuilder.RECIPES["clip-vit-mini"]

        class Builder(ClipBuilder):
            RECIPES: ClassVar = {suite: recipe}
            size: ClassVar = SIZES[name]

        BUILDERS[suite] = Builder
        build(place, suite, SEEDS[name])
    config = folder / "config" / "modelpool"
    config.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(pool_yaml(place.resolve()), sort_keys=False)
    (config / f"{suite}.yaml").write_text(text, encoding="utf-8")
    return json.loads((place / "MEASURED.json").read_text(encoding="utf-8"))


def pool_yaml(place: Path) -> dict[str, Any]:
    """The bundled pool with another build's weights."""
    base = str(place / "pretrained")
    return {
        "defaults": ["clip-vit-mini_TA6", "_self_"],
        "models": {"_pretrained_": base, **{task: str(place / task) for task in image.TA6}},
        "default_taskpool": {"clip_model": {"pretrained_model_name_or_path": base}},
    }


ROWS = (
    "surgery:calibration", "prob_surgery:calibration", "prob_surgery:tuned",
    "surgery_v2:calibration", "ridge_surgery", "anchored_regression", "distillation",
    "featcal", "featcal:tuned", "featcal:plus", "featcal+ridge_surgery",
)  # fmt: skip


def compare(folder: Path, suites: list[str]) -> list[Path]:
    """Run the comparison on suites; their log directories."""
    logs = []
    for suite in suites:
        logs.append(folder / "compare" / suite)
        words = [
            "method=compare", f"modelpool={suite}", "method.samples_per_task=64",
            "method.upstreams=[task_arithmetic]",
            "method.alone=[regmean,regmean_plusplus:tuned,lot:tuned]",
            f"method.post_merging=[{','.join(ROWS)}]", f"path.log_dir={logs[-1].resolve()}",
        ]  # fmt: skip
        subprocess.run(["fusion_bench", *words], cwd=folder, check=True)
    return logs


def over_trainings(logs: list[Path], reference: str = "featcal:plus") -> str:
    """Markdown table of every row's difference from one, over comparisons of several suites."""
    summary = summarise(find(logs).runs)
    found = over_suites(averages_of(summary.rows), reference)
    found.sort(key=lambda each: -each.interval.estimate)
    return over_suites_grid(found, reference).markdown()


def main() -> None:
    """Build what is missing, calibrate, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--builds", nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--samples", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    parser.add_argument("--compare", action="store_true", help="compare all methods instead")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = {name: built(options.folder, name) for name in options.builds}
    if options.compare:
        suites = ["clip-vit-mini_TA6", *(f"clip-vit-mini_{name}" for name in options.builds)]
        head = "`python benchmarks/other_builds.py --folder ... --compare`, test data"
        publish([head, over_trainings(compare(options.folder, suites))], options.out)
        return
    jobs = [(n, s, d) for n in options.builds for s in options.samples for d in options.seeds]
    rows = presets("clip-vit-mini_TA6", ["published", "without copies"])
    found: dict[str, dict[int, list[Any]]] = {}
    for name, samples, seed in track(jobs, console=Console(stderr=True)):
        with TemporaryDirectory() as logs:
            pool = f"clip-vit-mini_{name}"
            report = run(pool, samples, seed, rows, Path(logs), cwd=options.folder)
        found.setdefault(name, {}).setdefault(samples, []).append(report)
    words = ["--builds", *options.builds, "--samples", *map(str, options.samples)]
    words += ["--seeds", *map(str, options.seeds)]
    parts = [f"`python benchmarks/other_builds.py --folder ... {shlex.join(words)}`, test data"]
    for name, reports in found.items():
        report = next(iter(reports.values()))[0]
        size = "".join(f", {key} {value}" for key, value in SIZES[name].items())
        parts += [
            f"**{name}** (seed {facts[name]['seed']}{size}), merged by {report['upstream']}; means "
            f"over {len(options.seeds)} draws; {machine(report)}",
            table(reports),
        ]
    publish(parts, options.out)


if __name__ == "__main__":
    main()
