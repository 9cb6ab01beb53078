"""The end of a run: the export and its check, the report."""
