"""Shards in lanes, which are read while the model trains."""
