"""What train.py adds to a run: its start, its model, its checks."""
