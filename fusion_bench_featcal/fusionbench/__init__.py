"""FusionBench's side of a run, in its order.

`console`, `config_errors`: the screen, the log directory, errors and the end of a job.
`options`, `program`: a method's keys; FusionBench's program, its task pool and its mergers.
`pool_models`, `processors`: models of a pool by their files or whole; tokenizers and processors.
`pool_checks`, `pool_configs`, `empty_models`: checks before anything is loaded.
`upstream`, `fusing`: the upstream merger; mergers that read files tensor by tensor.
`plan_run`, `program_processes`: the plan of a run; several processes.
`saving`, `evaluation`, `run_results`, `loggers`: saving, evaluating and reporting the models.
"""
