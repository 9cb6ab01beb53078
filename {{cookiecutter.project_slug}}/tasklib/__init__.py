"""What a task.py may use. Nothing in here imports training/; delete what your task does not use."""
