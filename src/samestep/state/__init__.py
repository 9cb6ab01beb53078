"""The state of a run: what a checkpoint holds, how it is committed, verified and restored.

    weights.TrainingState   tensors by name, and the state of what else is registered
    inventory.Inventory     attributes of objects that a step has changed
    built                   groups, schedulers and rows, compared at a resume
    saver.Saver             save, restore, load_best; in the background, if it is to
    checkpoints             folders: commit, verify, find_checkpoint, prune

A save: each process writes its share of the tensors into a folder .partial and hashes it; the main
process writes the manifest, and renames the folder. What is not renamed is no checkpoint, and a
start passes over one whose files have other digests. provenance has what manifests say of a run.
"""
