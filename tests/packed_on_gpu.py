"""Compares FlashAttention in packed rows with a mask, and looks for waits. Needs a GPU to say much.

    python tests/packed_on_gpu.py

Prints one line a case, and ends with an error where losses or gradients differ by more than bf16
explains, where FlashAttention was not used, or where the CPU waited for the GPU.
"""

import copy
import dataclasses
import os

import torch

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
from samestep.models import next_token  # noqa: E402

if GPUS is None:
    del os.environ["CUDA_VISIBLE_DEVICES"]
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS
LENGTH, TEXTS = 1024, 40


def make_model(heads):
    """A Llama of two layers with this number of key and value heads, and 8 query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": heads, "vocab_size": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=LENGTH))
    next_token.prepare(model, LENGTH, 512, TEXTS)
    return model.train()


def make_batch(device):
    """Four rows of up to 40 texts; the last has padding at its end."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 1024, (4, LENGTH), generator=generator)
    positions = torch.zeros(4, LENGTH, dtype=torch.long)
    for row, size in enumerate((1024, 500, 97, 27)):
        positions[row] = torch.arange(LENGTH) % size
    positions[3, 1000:] = 0
    labels = tokens.masked_fill(positions == 0, -100)
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: values.to(device) for name, values in batch.items()}


def run(model, batch):
    """The loss, and all gradients in one tensor."""
    model.zero_grad()
    device = batch["labels"].device.type
    with torch.autocast(device, torch.bfloat16):
        loss = next_token.loss_sum(model, batch)
    (loss / batch["labels"].numel()).backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = make_batch(device)
    for heads in (8, 2):
        for checkpointing in (False, True):
            fast = make_model(heads).to(device)
            masked = copy.deepcopy(fast)
            masked.loss_plan = dataclasses.replace(fast.loss_plan, has_flash=False)
            if checkpointing:
                fast.gradient_checkpointing_enable()
            run(fast, batch)  # the first call may wait
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            loss, gradient = run(fast, batch)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
                with torch.profiler.profile() as profile:
                    run(fast, batch)
                assert "_varlen_attn" in profile.key_averages().table(max_name_column_width=100)
            expected, other = run(masked, batch)
            distance = float((gradient - other).norm() / other.norm())
            change = float((loss - expected).abs() / expected)
            case = f"{device}, {heads} heads of keys, recomputed {checkpointing}"
            differences = f"loss differs by {change:.1e}, gradient by {distance:.1e}"
            print(f"{case}: {differences}", flush=True)
            assert change < 1e-3 and distance < 0.02


if __name__ == "__main__":
    main()
