"""Seeds the global generators: whatever is drawn has a seed of its own (seed, step, place)."""

import random

import numpy as np
import torch

from samestep.step.order import hash_integers

# Places of a step that are no micro-batch, and words before the seeds of what is no step.
BEFORE, AFTER = -2, -1
_EVALUATION, AUGMENT = 0x6576616C, 0x61756774


def seed_micro_batch(seed: int, step: int, number: int = AFTER) -> None:
    """Seed what a model draws, such as masks of dropout, by the number of a micro-batch, counted
    from 0, in its step, counted from 1, and not by its rank.

    BEFORE: what comes before the micro-batches of a step. AFTER: what comes after them, such as an
    optimizer that draws.
    """
    _seed_initialized(hash_integers(seed, step - 1, number))


def seed_evaluation(ids_hash: int) -> None:
    """Seed what a model draws in an evaluation, by the rows of a batch, whoever evaluates them."""
    _seed_initialized(hash_integers(_EVALUATION, 0, 0, ids_hash))


def _seed_initialized(seed: int) -> None:
    """Seed the host and the devices that are initialized."""
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
