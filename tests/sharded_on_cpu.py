"""Runs a program of a project as if the CPU were a GPU, so that accelerate shards the model there.

    accelerate launch --config_file configs/accelerate/fsdp2.yaml sharded_on_cpu.py train.py ...

accelerate ignores FSDP, DeepSpeed and parallelism_config where it computes on the CPU. Here it is
told that several GPUs are there, which are the CPU, and meet through gloo.
"""

import os
import runpy
import sys

import torch

sys.path.insert(0, os.getcwd())
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["DS_ACCELERATOR"] = "cpu"

from accelerate.state import PartialState
from accelerate.utils import DistributedType

import training.device

if "LOCAL_RANK" in os.environ:
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
training.device.use_cpu = lambda: False
training.device.check_device = lambda _: None
torch.accelerator.device_count = lambda: 8  # for the check of the YAML
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # its reduction in shared memory compiles for 2 minutes

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
