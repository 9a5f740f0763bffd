"""Write a run's results as lm-eval does, a file per model.

    python examples/lm_eval_json.py RUN OUT

RUN is a folder with run.json of models that lm-eval scored (taskpool mergebench_llama). OUT gets
MODEL/results.json with lm-eval's metrics of each task.
"""

import json
import sys
from pathlib import Path

from fusion_bench_featcal.results import read_run


def main(run_folder: str, out: str) -> None:
    """Write one file per model, with lm-eval's names of metrics."""
    if not Path(run_folder, "run.json").is_file():
        sys.exit(f"{run_folder} has no run.json: give the log directory of a run")
    run = read_run(run_folder)
    if not any("," in metric for row in run.rows for metric in row.scores):
        sys.exit(f"{run_folder} has no metrics of lm-eval: its task pool must be an LMEvalTaskPool")
    for row in run.rows:
        results: dict[str, dict] = {}
        for metric, values in row.scores.items():
            for task, value in values.items():
                if "," in metric:  # lm-eval's metrics are `name,filter`
                    results.setdefault(task, {"alias": task})[metric] = value
        content = {
            "results": results,
            "model_name": run.title(row),
            "config": {"model": "hf", "method": row.settings, "random_seed": row.seed},
            "versions": run.versions,
        }
        file = Path(out, run.title(row).replace("/", "+"), "results.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
