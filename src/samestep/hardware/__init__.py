"""What a machine can do: `python -m samestep hardware check`, or one of these, or all.

    devices     check: devices that are lost or compute wrong numbers
    bench       speed of each device, of what connects them, and of a step of the project
    smoke       train.py on one device and on all: the same samples, losses and norms
    recommend   the memory that a model needs under each YAML, and the first that fits

`project.Project` is what is measured: a recipe, its task and data, without a run folder.
"""
