"""What train.py adds to `Training`: a config, prepared data, and the model of a task.

1. startup.prepare_run   before the processes meet: a RunStart; --check ends here
2. Run(start, ...)       all processes agree on where to start
3. Run.build_model, Run.preparing   the model of the task, for accelerator.prepare
4. Run.options           the arguments of Training, which asks this Run for more
5. probes                after the loop was tried: labels, eval_sums, eval_outputs
6. Run.score             the scores of an evaluation; what comes last is in `end`

A script of one's own has `training.script.Script` in its place.
"""
