"""What all rooms stand on.

    errors       UserError: one line, exit code 2. Failed: another process has failed
    console      one_line: the words of others, harmless; print_on_main: once, not once a process
    run_folder   RunLock, status.json and metrics.jsonl of a run
    fields       types of fields; files: texts and folders, replaced at once

None of it imports torch or accelerate when it is imported:

    >>> from samestep.base.errors import some
    >>> some(["a", "b", "c"], 2)
    'a, b, ...'
"""
