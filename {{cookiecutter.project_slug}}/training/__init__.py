"""What train.py stands on. Nothing in here imports task.py or tasklib/."""
