"""What a run can be asked: each verb is a module here. Every step of a run is a function."""

VERBS = ("replay", "rows", "when")
