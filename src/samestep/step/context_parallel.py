"""Context parallelism: each process of a group computes a part of each row."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel

from samestep.base.errors import UserError
from samestep.processes.mesh import Layout
from samestep.step.inputs import IGNORE_INDEX

_COMPARED = 64  # tokens of a sequence on each process, where check_parts compares sums


def check_model_shares_rows(model: torch.nn.Module, layout: Layout) -> None:
    """Raise UserError for a model that context parallelism would train wrongly and silently: only
    F.scaled_dot_product_attention is computed over all parts of a row."""
    if layout.cp == 1:
        return
    problem, name, config = "", type(model).__name__, getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", "sdpa")
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(windows):  # accelerate would attend to all tokens: huggingface/accelerate#4177
        problem = f"{name} sees a window of {max(filter(None, windows))} tokens"
    if getattr(config, "output_router_logits", False):
        problem = f"the router's loss of {name} (output_router_logits) needs whole rows"
    if attention == "eager" or attention.startswith(("flash", "flex")):
        problem = f"{name} computes attention by {attention}; it needs sdpa"
    for module in model.modules():
        rate = module.p if isinstance(module, torch.nn.Dropout) else 0
        if rate or getattr(module, "attention_dropout", 0):
            problem = f"{name} has dropout, whose masks the parts of a row would share"
        if getattr(module, "rope_type", "") in ("dynamic", "longrope"):
            problem = f"the rotary embedding of {name} depends on the length of a row"
    if problem:
        raise UserError(f"context parallelism: {problem}; use fsdp2.yaml")
    if hasattr(model, "set_attn_implementation"):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # transformers would take the parts of a row for packed texts, and mask them
        # (huggingface/transformers#39194). For a name that it does not know it makes no mask.
        AttentionInterface.register("causal", sdpa_attention_forward)
        model.set_attn_implementation("causal")


@contextlib.contextmanager
def split_rows(accelerator: Accelerator, *batches: dict[str, torch.Tensor]) -> Iterator[None]:
    """Give this process its part of each row in the body, under context parallelism.

    The batches stay changed: what has the shape of `input_ids`, (B, T), becomes (B, T / n) on each
    of n processes; `position_ids` has the places in the row, and `shift_labels` the label that each
    token predicts, also where that is in another part. Numbers of a whole row, (B,), become 0 on
    all but the first process: sums over the processes are those over the rows. A backward pass must
    be inside, too. Raises UserError for a batch with a mask or positions of its own.
    """
    config = accelerator.parallelism_config
    if not (config and config.cp_enabled):
        yield
        return
    first = accelerator.torch_device_mesh["cp"].get_local_rank() == 0
    parts = []
    for batch in batches:
        rows, length = batch["input_ids"].shape
        for name in ("attention_mask", "position_ids"):
            if name in batch:
                raise UserError(
                    f"context parallelism: the parts of a sequence see no {name}, and task.collate "
                    "returns it; leave it out if all sequences are full, or use fsdp2.yaml"
                )
        batch["position_ids"] = torch.arange(length, device=accelerator.device).repeat(rows, 1)
        labels = batch.get("labels")
        if labels is not None and labels.shape == (rows, length) and "shift_labels" not in batch:
            batch["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        for name, values in batch.items():
            # torch changes them in place, and other tensors may share their memory.
            batch[name] = values.clone(memory_format=torch.contiguous_format)
            if values.shape[:2] == (rows, length):
                parts.append(batch[name])
            elif not first:
                batch[name].zero_()
    # The fallback, `math`, would apply the causal mask of whole rows to parts.
    kernels = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
    along = {"buffer_seq_dims": [1] * len(parts), "no_restore_buffers": {*parts}}
    with kernels, accelerator.maybe_context_parallel(buffers=parts, **along):
        yield


@torch.no_grad()
def check_parts(
    accelerator: Accelerator, model: torch.nn.Module, functions: dict[str, Callable], batch: dict
) -> None:
    """Raise UserError if sums over the parts of a sequence are not those of the whole sequence.

    `functions` are the task's loss_sum and eval_sums by name, `model` the prepared one in eval
    mode; `batch` has whole sequences. Of the first, a piece is compared that is short: a label that
    is lost where two parts meet is then a large part of the sum. All processes must call it.
    """
    mesh = accelerator.torch_device_mesh["cp"]
    rows, length = batch["input_ids"].shape
    kept = min(length, mesh.size() * _COMPARED)
    whole = {}
    for name, values in batch.items():
        cut = values[:1, :kept] if values.shape[:2] == (rows, length) else values[:1]
        whole[name] = cut.clone()
    parts = dict(whole)
    expected = {name: _sums_of(model, call, whole) for name, call in functions.items()}
    with split_rows(accelerator, parts):
        actual = {name: _sums_of(model, call, parts) for name, call in functions.items()}
    tolerance = 1e-4 if accelerator.mixed_precision == "no" else 1e-2
    for name, sums in expected.items():
        for key, total in sums.items():
            added = actual[name][key]
            dist.all_reduce(added, group=mesh.get_group())
            if not torch.allclose(added, total, rtol=tolerance, atol=tolerance):
                value = f"task.{name}[{key!r}]" if key else f"task.{name}"
                raise UserError(
                    f"context parallelism: {value} is {total.sum():.6g} for a sequence, and "
                    f"{added.sum():.6g} added up over its parts; take the labels that tokens "
                    "predict from batch['shift_labels'] if it is there, as "
                    "samestep.models.next_token does, or use fsdp2.yaml"
                )


def _sums_of(model: torch.nn.Module, function: Callable, batch: dict) -> dict[str, torch.Tensor]:
    """Compute a function of the task, whose result is a tensor or a dict of them, in float64."""
    result = model(function, dict(batch))
    named = result if isinstance(result, dict) else {"": result}
    return {name: value.detach().double() for name, value in named.items()}
