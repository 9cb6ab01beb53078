"""What is told of a run: metrics, trackers, speed, the model card."""
