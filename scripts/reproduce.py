"""List the commands of the paper's tables and figures, or run those of the bundled suites.

    python scripts/reproduce.py [--list] [--paper] [--out outputs/reproduce]

`--paper` also runs the commands with weights and data from the Hugging Face hub. Finished parts
stay: repeat the command to go on. A command that fails does not stop the others.
`featcal report FOLDER` prints the results of a sweep's cells.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import paper

ROOT = Path(__file__).resolve().parent.parent
CLIP = ("clip-vit-mini_TA6",)
TEXTS = ("flan-t5-mini_TA6", "llama-mini_TA6")
KINDS = ",".join(
    f"{{kind: {kind}, severity: 3}}" for kind in ("gaussian_noise", "motion_blur", "fog")
)
SEVERITIES = ",".join(f"{{kind: fog, severity: {number}}}" for number in range(1, 6))
B32, L14 = "clip-vit-base-patch32", "clip-vit-large-patch14"


class Item(NamedTuple):
    """A table or figure of the paper: method, bundled model pools, and the paper's."""

    name: str  # folder of its results
    source: str
    content: str
    method: str
    bundled: tuple[str, ...]
    hub: tuple[str, ...]

    def commands(self, pools: tuple[str, ...]) -> list[str]:
        """One command for each model pool."""
        multirun = "-m " if " " in self.method else ""
        return [f"fusion_bench {multirun}method={self.method} modelpool={pool}" for pool in pools]


ITEMS = (
    Item("clip", "Tables 1, 2, 7 to 11", "accuracy on CLIP: mergers, with each post-merging method",
         "compare", CLIP, tuple(f"{model}_{suite}" for suite in ("TA8", "TALL14", "TALL20")
                                for model in (B32, L14))),
    Item("texts", "Tables 3, 4, 14", "accuracy on FLAN-T5 and Llama", "compare", TEXTS,
         ("flan-t5-base_glue", "flan-t5-large_glue_lora", "mergebench_llama-3.2-3b-instruct",
          "mergebench_llama-3.1-8b-instruct")),
    Item("samples", "Tables 5, 12, 13, Figure 3", "samples per task: accuracy and costs",
         "compare method.samples_per_task=8,16,32,64,128,256,512", (*CLIP, *TEXTS),
         (f"{B32}_TA8",)),
    Item("corruption", "Table 6", "corrupted calibration images, clean tests",
         f"compare 'method.calibration_corruption=null,{KINDS}'", CLIP, (f"{B32}_TA8",)),
    Item("severity", "Figure 4", "the same by severity",
         f"compare 'method.calibration_corruption={SEVERITIES}'", CLIP, (f"{B32}_TA8",)),
    Item("sweep", "Figure 5", "lambda (alpha and rho: mix_alpha, anchor_rho)",
         "compare +method.post_merging_methods.featcal.ridge_lambda=0.001,0.01,0.05,0.1,1,10", CLIP,
         (f"{B32}_TA8",)),
    Item("diagnose", "Figures 1, 2, 6, 7",
         "drift by block, cosine to the experts, shares of variance (PCA)", "diagnose", CLIP,
         (f"{B32}_TA8",)),
    Item("tasks", "not in the paper", "number of tasks", "compare method.tasks=2,4,6,8",
         ("clip-vit-mini_all8",), (f"{B32}_TALL20",)),
)  # fmt: skip


def commands_part() -> str:
    """Return a table of the items for docs/paper.md."""
    lines = [
        [item.source, item.content, f"`method={item.method}`", "<br>".join(item.bundled),
         "<br>".join(item.hub)]
        for item in ITEMS
    ]  # fmt: skip
    heads = ["", "", "method", "bundled pools", "the paper's pools"]
    return paper.table(heads, lines).replace("--:", ":--")


def run(item: Item, pools: tuple[str, ...], out: Path) -> list[str]:
    """Run an item on pools and return the commands that failed."""
    failed = []
    for command, pool in zip(item.commands(pools), pools, strict=True):
        print(f"--- {item.source}: {command}", flush=True)
        folder = out / item.name / pool
        words = [*shlex.split(command), f"path.log_dir={folder}"]
        if "-m" in words:
            words[-1:] = [f"hydra.sweep.dir={folder}", f"method.results_dir={folder / 'cells'}"]
        if subprocess.run(words, cwd=ROOT).returncode:
            failed.append(command)
    return failed


def main() -> None:
    """List or run the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--paper", action="store_true", help="with weights of the hub, too")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce"))
    options = parser.parse_args()
    failed = []
    for item in ITEMS:
        pools = item.bundled + (item.hub if options.paper else ())
        if options.list:
            print(f"# {item.source}: {item.content}", *item.commands(pools), sep="\n")
        else:
            failed += run(item, pools, options.out)
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
