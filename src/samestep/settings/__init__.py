"""Settings: fields of a recipe and of a task, from defaults, YAML and flags."""
