"""Data sets in shards that are read while training."""
