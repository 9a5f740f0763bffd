"""FusionBench's side of a run, in the order of its steps.

`console`, `config_checks`: the screen, errors, and early checks of a config.
`run_settings`, `method`: settings of a run, methods whose keys are declared settings.
`method_inputs`, `data`, `program`: inputs of methods, their samples, FusionBench's program.
`pool_models`, `processors`: models of a pool by their files or whole, tokenizers, processors.
`pool_checks`: checks before experts are loaded.
`upstream`: the merging method, of which averages and task arithmetic read files by tensors.
`plan_run`, `program_processes`: the plan of a run, and several processes.
`rows`, `featcal`: a method that makes the model of a row, and FeatCal as one.
`driver`: the one run of every method: merge, make the rows, report, save one.
`saved_model`, `evaluation`, `report`, `saved_report`: saving, evaluating, reporting the models.
"""
