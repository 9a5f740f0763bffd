"""Mistakes in data, evaluation, order of a run and saving."""

from mistakes.entry import Mutation

MUTATIONS = [
    Mutation(
        "labels 0 to 10 in the order of texts",
        "data/labels.py",
        "return sorted(names, key=int) if all(name.isdecimal() for name in names) else names",
        "return names",
        "data/test_load_images.py",
    ),
    Mutation(
        "transparency dropped",
        "data/pictures.py",
        'canvas.alpha_composite(picture.convert("RGBA"))\n    return canvas.convert("RGB")',
        'return picture.convert("RGB")',
        "data/test_image_batches.py",
    ),
    Mutation(
        "loss is averaged over batches",
        "tasks/scoring.py",
        "loss_sum / len(right)",
        "loss_sum / len(correct)",
        "tasks/test_clip_task_pool.py::test_loss_is_a_mean_over_items_whatever_the_batch_size",
    ),
    Mutation(
        "all tasks draw the same positions",
        "data/draws.py",
        'hashlib.sha256(f"{seed}:{task}".encode())',
        'hashlib.sha256(f"{seed}".encode())',
        "test_calibration_data.py",
    ),
    Mutation(
        "experts that generate see their padding",
        "data/generation.py",
        "for prompt in prompts], 0, left=True)",
        "for prompt in prompts], 1, left=True)",
        "test_text_pools.py",
    ),
    Mutation(
        "row that is saved ignores method.save",
        "fusionbench/saving.py",
        "        if facts.row != self.row:\n            return\n",
        "",
        "test_algorithm.py",
    ),
    Mutation(
        "evaluated before it is saved",
        "fusionbench/run_results.py",
        "        self.saver.offer(result.model, facts)\n"
        "        self.add_made(name, result.model, **details, seed=settings.seed)\n",
        "        self.add_made(name, result.model, **details, seed=settings.seed)\n"
        "        self.saver.offer(result.model, facts)\n",
        "test_algorithm.py",
    ),
    Mutation(
        "temporary folder stays when saving fails",
        "files/__init__.py",
        "    finally:\n        remove(new)\n",
        "    finally:\n        pass\n",
        "test_saving.py",
    ),
    Mutation(
        "old weights carried over to the new model",
        "files/__init__.py",
        "is_top = Path(folder) == source",
        "is_top = False",
        "test_saving.py",
    ),
    Mutation(
        "prompt counts among the targets",
        "data/text_samples.py",
        "labels = [IGNORED] * len(prompt) + (text.scored or target)",
        "labels = prompt + (text.scored or target)",
        "data/test_text_samples.py",
    ),
    Mutation(
        "prompt and target are tokenised one by one",
        "data/text_samples.py",
        "if not special or any(map(str.isspace, prompt[-1:] + target[:1])):",
        "if not special:",
        "data/test_text_pairs.py",
    ),
    Mutation(
        "a column that changes the input is dropped",
        "data/text_formats.py",
        'if needed and text.form != "tokens":',
        "if not text:",
        "data/test_text_formats.py",
    ),
    Mutation(
        "labels of a table are the head's numbers",
        "data/text_rows.py",
        "return {**row, **self._class_names(row)} if self._names else row",
        "return row",
        "folders/test_text_tasks.py",
    ),
    Mutation(
        "rows that are held back are calibrated on",
        "folders/tasks.py",
        "order[: min(requested, available - held_back)]",
        "order[:requested]",
        "folders/test_folder_runs.py",
    ),
    Mutation(
        "a base that is no relative is accepted",
        "experts/likeness.py",
        "if distance > UNRELATED:",
        "if distance < 0:",
        "folders/test_folder_refusals.py",
    ),
    Mutation(
        "a classifier is evaluated with its expert's body",
        "folders/models.py",
        "        setattr(classifier, classifier.base_model_prefix, body)\n",
        "",
        "folders/test_folder_runs.py",
    ),
    Mutation(
        "a pooler is no part of a head",
        "folders/models.py",
        "for name in tail_of(self.empty_body, self._stages[-1][-1])\n            if not all",
        "for name in []\n            if not all",
        "folders/test_folder_runs.py",
    ),
]
