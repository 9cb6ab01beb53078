"""Prepared data: made once for a key, saved, and verified."""
