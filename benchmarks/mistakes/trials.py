"""Mistakes in held-out samples and in the choice among several calibrations."""

from mistakes.entry import Mutation

HELD, TRIALS = "test_held_out.py", "test_trials.py"

MUTATIONS = [
    Mutation(
        "held-out samples are summed, too",
        "engine/loop.py",
        "                        batches[number] = self._activations.settled(batch)\n"
        "                    continue\n",
        "                        batches[number] = self._activations.settled(batch)\n",
        HELD,
    ),
    Mutation(
        "the merged side follows the calibrated one to the next stage",
        "engine/loop.py",
        "problem.begin(model, index, inputs, end) if index else batch.cal",
        "batch.cal",
        HELD,
    ),
    Mutation(
        "merged features of a replayed model by the calibrated one",
        "engine/loop.py",
        "model = self._problem.model if self._merged is None else self._merged\n"
        "        hidden, batch.merged",
        "model = self._problem.model\n        hidden, batch.merged",
        HELD,
    ),
    Mutation(
        "a restored block is skipped by the merged side",
        "engine/loop.py",
        "            self._step_merged(block, batch)\n        self._kept.restore",
        "            pass\n        self._kept.restore",
        HELD,
    ),
    Mutation(
        "held-out samples compared at all positions",
        "engine/held_out.py",
        "return final_rows(problem, inputs) if read is None else CountedRows.of_weights(read)",
        "return batch.valid",
        HELD,
    ),
    Mutation(
        "held-out part of a batch keeps its first number",
        "engine/samples.py",
        "start=self.start + count)",
        "start=self.start)",
        HELD,
    ),
    Mutation(
        "copies are made of held-out samples",
        "engine/augmentation.py",
        "count = 0 if batch.held else copies_of(",
        "count = copies_of(",
        HELD,
    ),
    Mutation(
        "one held-out sample more where a batch ends",
        "engine/held_out.py",
        "while waiting and last - waiting[0].samples >= most:",
        "while waiting and last - waiting[0].samples >= most - 1:",
        HELD,
    ),
    Mutation(
        "cosines are summed, not averaged",
        "engine/visits.py",
        "= cosines / rows",
        "= cosines",
        HELD,
    ),
    Mutation(
        "the last trial is kept",
        "trials.py",
        "if found.mean > seen.mean and not",
        "if not",
        TRIALS,
    ),
    Mutation(
        "a trial may put a task behind",
        "trials.py",
        " and not set(found.behind) - set(seen.behind):",
        ":",
        TRIALS,
    ),
    Mutation(
        "each trial changes the settings as given",
        "trials.py",
        "changed = change(chosen, seen, text)",
        "changed = change(settings, seen, text)",
        TRIALS,
    ),
    Mutation(
        "what did not help is tried again",
        "trials.py",
        'if changed is None or changed in [record["change"] for record in records]:',
        "if changed is None:",
        TRIALS,
    ),
    Mutation(
        "larger lambdas for images, too",
        "trials.py",
        "settings.stages == 2 and (asked or text)",
        "settings.stages == 2",
        TRIALS,
    ),
    Mutation(
        "trials share one folder of checkpoints",
        "trials.py",
        'own = None if folder is None else f"{folder}/trial-{number}"',
        "own = folder",
        TRIALS,
    ),
    Mutation(
        "the merger runs again in a later trial",
        "calibration.py",
        "merging=None if again else merging,",
        "merging=merging,",
        f"{TRIALS} reads/test_fused_merge.py",
    ),
    Mutation(
        "drift weights by the squared drift",
        "trials.py",
        "now.get(task, 1.0) * drift for task",
        "now.get(task, 1.0) * drift**2 for task",
        TRIALS,
    ),
    Mutation(
        "an even drift is weighed",
        "trials.py",
        "if max(drifts) ** 2 <= UNEVEN *",
        "if max(drifts) ** 2 < 0 *",
        TRIALS,
    ),
    Mutation(
        "weights of tasks are not used",
        "engine/plus_rule.py",
        "weight = factor * weights[number]",
        "weight = weights[number]",
        f"{TRIALS} test_plus_oracle.py",
    ),
    Mutation(
        "both stages' lambdas are scaled",
        "engine/group_sums.py",
        "        first *= settings.first_ridge_scale\n",
        "        first, second = (settings.first_ridge_scale * x for x in (first, second))\n",
        "test_plus_oracle.py",
    ),
    Mutation(
        "no cosine above the merged model's is told",
        "trials.py",
        "if not cosine > self.merged[task]]",
        "if not cosine >= self.merged[task]]",
        TRIALS,
    ),
]
