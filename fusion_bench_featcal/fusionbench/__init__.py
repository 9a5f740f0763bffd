"""The room where FusionBench is met, in the order of a run.

`console`, `hydra_job`, `ending`: the screen, the log directory, the end of a job and of a process.
`options`, `program`: a method's keys; FusionBench's program, its task pool and its mergers.
`pool_models`, `processors`: models of a pool by their files or whole; tokenizers and processors.
`pool_checks`, `pool_configs`, `save_target`: refusals before anything is loaded.
`fusing`, `reads`, `program_processes`: a merge that shares reads; reads counted; several processes.
`plan_run`, `pool_calibration`: the plan of a run, and one calibration on a pool.
`saving`, `model_card`, `evaluation`, `run_results`: what becomes of the models.
"""
