"""What all rooms stand on: one line of text, files, types of fields, child processes."""
