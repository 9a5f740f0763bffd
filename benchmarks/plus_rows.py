"""Accuracy of FeatCal+ by how much rows out of experts' weights count, on the bundled suites.

    python benchmarks/plus_rows.py --pool clip-vit-mini_TA6 --data clean fog --samples 64 256

Every row is a calibration of the merged model (task arithmetic, 0.3), in one process that loads
models and test data once. With `--gamma` rows count that much whatever the
samples are; without it as the rule has it. Accuracies are on test data, seconds are CPU seconds of
the calibration.

Data: `clean`, `fog` (severity 3), `noise` (independent pixels), `one` (the first task's samples for
all tasks), `next` (each task has the next one's).
"""

import argparse
import copy
import statistics
import time
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import torch
from fusion_bench.utils import instantiate_utils
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal import FeatCalSettings, Plus, calibrate
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import load_input_processor

SETTINGS: dict[str, Any] = {
    "calibrate_norm": False, "decoder_rows": "auto", "augment": "auto", "log_drift": False
}  # fmt: skip
DERIVED = "fusion_bench_featcal.tasks."


class Suite:
    """A bundled suite with its merged model, loaded once."""

    def __init__(self, pool: str) -> None:
        """Load everything but calibration samples."""
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            words = ["method=featcal", f"modelpool={pool}"]
            config = compose("fabric_model_fusion", overrides=words).modelpool
        self.taskpool = instantiate(config.default_taskpool, _recursive_=False)
        self.config: Any = OmegaConf.to_container(config, resolve=True)
        for key in ("default_taskpool", "featcal"):
            del self.config[key]
        modelpool = self.pool("clean")
        self.tasks = list(modelpool.model_names)
        self.processor = load_input_processor(modelpool)
        self.base = load_pool_model(modelpool, "_pretrained_")
        self.experts = {task: load_pool_model(modelpool, task) for task in self.tasks}
        self.merged = copy.deepcopy(self.base)
        parameters = [dict(expert.named_parameters()) for expert in self.experts.values()]
        with torch.no_grad():
            for name, start in self.merged.named_parameters():
                start += 0.3 * torch.stack([each[name] - start for each in parameters]).sum(0)

    def pool(self, data: str) -> Any:
        """The model pool with other calibration data."""
        config = copy.deepcopy(self.config)
        sets = config["train_datasets"]
        tasks = list(sets)
        for number, task in enumerate(tasks):
            old = self.config["train_datasets"]
            if data == "fog":
                sets[task] = {"_target_": DERIVED + "corrupted", "data": old[task], "task": task}
                sets[task] |= {"corruption": "fog", "severity": 3}
            elif data == "noise":
                sets[task] = {"_target_": DERIVED + "NoiseImages", "size": 28, "task": task}
            elif data in ("one", "next"):
                sets[task] = old[tasks[0 if data == "one" else (number + 1) % len(tasks)]]
        return instantiate(OmegaConf.create(config), _recursive_=False)

    def accuracies(self, model: Any) -> dict[str, float]:
        """Test accuracy by task, in %."""
        found = evaluate(self.taskpool, model, name="row").accuracy
        return {task: 100 * found[task] for task in self.tasks}


def main() -> None:
    """Calibrate, evaluate, print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", required=True)
    parser.add_argument("--data", nargs="+", default=["clean"])
    parser.add_argument("--samples", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43])
    parser.add_argument("--gamma", type=float)
    args = parser.parse_args()
    instantiate_utils.PRINT_FUNCTION_CALL = False
    torch.set_num_threads(1)
    suite = Suite(args.pool)
    known = () if args.gamma is None else suite.tasks
    rule = Plus(gammas=dict.fromkeys(known, args.gamma or 0.0))
    merged = suite.accuracies(suite.merged)
    experts = {t: suite.accuracies(model)[t] for t, model in suite.experts.items()}
    print(f"merged {statistics.mean(merged.values()):.2f}\n")
    print("| data | samples | seed | average | worst task | its gap recovered | named | CPU s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for data in args.data:
        for samples in args.samples:
            for seed in args.seeds:
                settings = FeatCalSettings(
                    rule=rule, samples_per_task=samples, seed=seed, **SETTINGS
                )
                drawn = calibration_batches(
                    suite.pool(data), suite.tasks, settings.replace(batch_size=64), suite.processor
                )
                batches, start = {t: list(b) for t, b in drawn.items()}, time.process_time()
                result = calibrate(suite.merged, suite.base, suite.experts, batches, settings)
                seconds, found = time.process_time() - start, suite.accuracies(result.model)
                gaps = {t: (found[t] - merged[t]) / (experts[t] - merged[t]) for t in found}
                worst = min(found, key=found.__getitem__)
                named = [r["task"] for r in result.log.of_kind("trust") if r["named"]]
                print(
                    f"| {data} | {samples} | {seed} | {statistics.mean(found.values()):.2f} | "
                    f"{worst} {found[worst]:.1f} | {100 * gaps[worst]:.0f} % | {len(named)} | "
                    f"{seconds:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
