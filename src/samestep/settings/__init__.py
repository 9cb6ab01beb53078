"""Settings: fields of a recipe and of a task. Flags override a YAML, which overrides defaults.

    run_config.RunConfig   the fields of folders, trackers and speed; train.py adds its own
    config.parse_config    the config that a command means; an unknown field is an error
    config.convert         one value, by the type of its field
    length                 the steps of a run on few rows, and advice for one that is too short

Types and errors are those of pydantic:

    >>> from samestep.settings import config
    >>> config.convert(list[int], ["10", "13"])
    [10, 13]
"""
