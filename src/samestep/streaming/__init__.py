"""Rows that are read from shards while the model trains."""
