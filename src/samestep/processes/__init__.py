"""The processes of a run: who they are, what they tell each other, how they end.

    mesh.Layout         replicas, shards, stages: who computes micro-batches of its own
    ranks.Ranks         sums and objects over them
    places              who waits for whom at a save and at an evaluation
    sharding            weights of which each process has a part
    alike               what must be the same on all; exclusions: what cannot be combined
    stop, failures      a signal is a flag; an error is a line and an exit code

`with ranks.fail_together():` raises on all processes what its body has raised on one.
"""
