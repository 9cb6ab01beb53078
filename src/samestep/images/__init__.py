"""Images to pixels."""
