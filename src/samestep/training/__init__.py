"""What the loop of train.py calls: the run, its data, its log, its checkpoints."""
