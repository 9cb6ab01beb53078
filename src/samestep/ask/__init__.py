"""What a run can be asked: each verb is a module here. Every step of a run is a function."""

VERBS = ("audit", "diff", "receipt", "replay", "rows", "when")
