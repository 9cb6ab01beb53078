"""`Training`: a run of any script, which resumes, logs, saves and evaluates. Its loop:

1. resume   the newest valid checkpoint is loaded (resume.ResumePoint)
2. trial    the body of the loop is tried on a few rows, before the first step
3. steps    a step.Step: batches and clip; then the script's optimizer.step()
4. log      a line of metrics.jsonl, where it is due (log.RunLog)
5. save     where it is due; after a signal, too: exit code 75

`script.Script` checks what a script gives; `replay` has the questions of samestep replay. An
example is the docstring of training.py.
"""
