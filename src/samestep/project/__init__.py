"""What train.py and task.py add: settings, the contract, the start, a run, its log and its end."""
