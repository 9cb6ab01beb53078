"""What hardware.py stands on: it checks, measures and advises; training never imports it."""
