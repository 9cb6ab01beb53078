"""Seeds the global generators: whatever is drawn has a seed of its own (seed, step, place)."""

import random

import numpy as np
import torch

from samestep.step.order import hash_integers

# Places that are no micro-batch of a step, and the word before the seeds of `augment`.
AFTER, BEFORE, EVALUATION = -1, -2, -3
AUGMENT = 0x61756774


def seed_micro_batch(seed: int, step: int, number: int = AFTER) -> None:
    """Seed what a model draws, such as masks of dropout, by the number of a micro-batch, counted
    from 0, in its step, counted from 1, and not by its rank.

    BEFORE: what comes before the micro-batches of a step. AFTER: what comes after them, such as an
    optimizer that draws. EVALUATION: a batch of an evaluation, by the hash of its rows as `step`.
    """
    seed = hash_integers(seed, step - 1, number)
    seed_host(seed)
    # torch.manual_seed would format a stack for each kind of device that is not initialized.
    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    if device.type == "mps":
        torch.mps.manual_seed(seed)
    elif torch.get_device_module(device).is_initialized():
        torch.get_device_module(device).manual_seed_all(seed)


def seed_everything(seed: int) -> None:
    """Seed all that a model may draw from, on devices that are not initialized yet, too."""
    seed_host(seed)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed what draws on the CPU; masks of time in speech models are NumPy's."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
