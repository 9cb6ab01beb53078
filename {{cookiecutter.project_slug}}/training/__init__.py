"""The modules that train.py is built on. None of them imports task.py or tasklib/.

Start:
    begin            Ctrl-C while a program imports; what the environment must not hold
    contract         the functions that train.py calls in task.py, and checks of their results
    startup          all that happens before the model is built: config, data, where to start
    config           reads the recipe and the flags; reports mistakes in one line
    accelerate_yaml  checks the accelerate YAML
    meeting          waits for processes that still prepare data

Steps:
    order            which row each position of a run takes
    batches          the samples of a step, and how the processes share its micro-batches
    ranks            sums, messages and errors between the processes
    monitor          skipped steps, loss spikes, throughput

State:
    weights          weights and optimizer state in checkpoints
    checkpoints      commits, verifies and prunes checkpoints
    run_folder       lock, status.json, and files that are replaced in one step

Output and end:
    console          prints once for all processes
    tracking         metrics.jsonl, the tracker, the progress bar
    model_card       the README.md of a trained model
    shutdown         signals, errors, exit codes
"""
