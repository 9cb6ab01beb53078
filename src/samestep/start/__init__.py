"""What happens before the processes of a run meet."""
