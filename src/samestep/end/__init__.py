"""The end of train.py: `finish(training, evaluate)`.

1. The best weights are loaded, if they are to be exported, and evaluated.
2. The main process exports the model with its card. The other processes end.
3. The status is "finished". What follows may fail, and the run has not failed.
4. The report of the task, the curves; the export must give what the trained model gave.

`write_evaluation` is the end of --eval_only.
"""
