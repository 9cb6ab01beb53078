"""Runs train.py in one of several processes that share a GPU: gloo allows that, NCCL does not."""

import os
import runpy
import sys

import torch.distributed as dist

init_process_group = dist.init_process_group


def init_with_gloo(backend=None, *args, device_id=None, **kwargs):
    return init_process_group("gloo", *args, **kwargs)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.getcwd()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group = dist.distributed_c10d.init_process_group = init_with_gloo
    runpy.run_path(sys.argv[0], run_name="__main__")
