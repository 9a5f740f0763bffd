"""FusionBench's side of a run, in the order of its steps.

`console`, `config_checks`: the screen, errors, and early checks of a config.
`options`, `method`, `program`: settings, methods with declared settings, FusionBench's program.
`pool_models`, `processors`: models of a pool by their files or whole, tokenizers, processors.
`pool_checks`: checks before experts are loaded.
`upstream`: the upstream merger, which reads files tensor by tensor if it is a plain one.
`plan_run`, `program_processes`: the plan of a run, and several processes.
`rows`, `featcal`: a method that makes the model of a row, and FeatCal as one.
`driver`: the one run of every method: merge, make the rows, report, save one.
`saving`, `evaluation`, `report`: saving, evaluating and reporting the models.
"""
