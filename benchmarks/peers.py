"""The peers: programs that do the work of work.py, each as its documentation writes it.

    python benchmarks/peers.py NAME

is one process of a peer. compare.py starts it, with BENCH_WORK and, for several processes, the
variables of torchrun. clock.py stops it between two steps, from outside of its loop.
"""

import json
import os
import runpy
import sys
import warnings
from contextlib import nullcontext
from functools import partial

import work
from work import Work


def plain(todo: Work, device: str = "cpu", compiled: bool = False) -> None:
    """A loop in PyTorch alone; in bf16 on a GPU."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader, DistributedSampler

    model, dataset, sampler = work.build_model(todo), work.build_dataset(todo), None
    on_gpu = device == "cuda"
    optimizer = work.build_optimizer(model.to(device))
    forward = torch.compile(model) if compiled else model
    if todo.processes > 1:
        dist.init_process_group("gloo")
        forward = model = DistributedDataParallel(model)
        sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, todo.micro_batch, sampler=sampler, pin_memory=on_gpu)
    losses, micro_batches = [], todo.micro_batches
    for number, batch in enumerate(loader, 1):
        last = number % micro_batches == 0
        alone = nullcontext() if last or todo.processes == 1 else model.no_sync()
        batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        with alone:
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                loss = forward(**batch)["loss"] / micro_batches
            loss.backward()
        losses.append(loss.detach())
        if not last:
            continue
        norm = clip_grad_norm_(model.parameters(), work.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        step = number // micro_batches
        if step % work.LOG_EVERY == 0:
            loss = torch.stack(losses).sum().item() / work.LOG_EVERY
            print({"step": step, "loss": loss, "grad_norm": norm.item()}, flush=True)
            losses = []


def raw_accelerate(todo: Work) -> None:
    """The same loop with Accelerate."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    micro_batches = todo.micro_batches
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    model, dataset = work.build_model(todo), work.build_dataset(todo)
    loader = DataLoader(dataset, batch_size=todo.micro_batch)
    optimizer = work.build_optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), work.MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        step = number // micro_batches
        if accelerator.sync_gradients and step % work.LOG_EVERY == 0:
            loss = torch.stack(losses).mean().item()
            print({"step": step, "loss": loss, "grad_norm": norm.item()}, flush=True)
            losses = []


def trainer(todo: Work, **options) -> None:
    """Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    model, dataset = work.build_model(todo), work.build_dataset(todo)
    options = {"use_cpu": True, **options}
    arguments = TrainingArguments(
        output_dir=todo.output,
        per_device_train_batch_size=todo.micro_batch,
        gradient_accumulation_steps=todo.micro_batches,
        train_sampling_strategy="sequential",
        max_steps=len(dataset) // todo.batch,
        max_grad_norm=work.MAX_GRAD_NORM,
        lr_scheduler_type="constant",
        logging_steps=work.LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    optimizers = (work.build_optimizer(model), None)
    Trainer(model, arguments, train_dataset=dataset, optimizers=optimizers).train()


def lightning(todo: Work) -> None:
    """Trainer of Lightning."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, DistributedSampler

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = work.build_model(todo)

        def training_step(self, batch):
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return work.build_optimizer(self)

    dataset, rank = work.build_dataset(todo), int(os.environ.get("RANK", 0))
    sampler = DistributedSampler(dataset, todo.processes, rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=todo.micro_batch, sampler=sampler)
    lightning.Trainer(
        accelerator="cpu",
        devices=todo.processes,
        use_distributed_sampler=False,  # it would shuffle
        max_epochs=1,
        gradient_clip_val=work.MAX_GRAD_NORM,
        accumulate_grad_batches=todo.micro_batches,
        logger=CSVLogger(todo.output),
        log_every_n_steps=work.LOG_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


def training(todo: Work) -> None:
    """A loop with Accelerate around samestep's Training, which orders the samples by itself."""
    from accelerate import Accelerator

    from samestep import Training

    do_not_count_the_trial()
    accelerator, model = Accelerator(cpu=True), work.build_model(todo)
    model, optimizer = accelerator.prepare(model, work.build_optimizer(model))
    rows = work.build_dataset(todo).dataset
    training = Training(
        accelerator, model, optimizer, rows, folder=f"{todo.output}/run", seed=work.SEED,
        global_batch_size=todo.batch, micro_batch_size=todo.micro_batch,
        count=lambda batch: int((batch["labels"][:, 1:] != -100).sum()), log_every=work.LOG_EVERY,
    )  # fmt: skip
    for step in training.steps(1_000_000):
        for batch in step:
            with accelerator.accumulate(model):
                step.backward(model(**batch)["loss"], mean=True)
        norm = step.clip(work.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step.loss is not None:
            print({"step": step.number, "loss": step.loss, "grad_norm": norm.item()}, flush=True)


def do_not_count_the_trial() -> None:
    """Lets clock.py not count the rows that samestep tries a loop on, before its first step."""
    from torch.utils._python_dispatch import _disable_current_modes

    from samestep.training import training

    def try_uncounted(*given, old=training.try_loop):
        with _disable_current_modes():
            yield from old(*given)

    training.try_loop = try_uncounted


def baked(todo: Work, **changes) -> None:
    """train.py of a baked project, unchanged."""
    do_not_count_the_trial()
    os.chdir(todo.project)
    sys.path[0] = todo.project
    flags = work.flags(todo, micro_batch_size=todo.micro_batch, **changes)
    sys.argv = ["train.py", *flags, "--output_dir", f"{todo.output}/run"]
    runpy.run_path("train.py", run_name="__main__")


PEERS = {
    "plain loop": plain,
    "Accelerate": raw_accelerate,
    "HF Trainer": trainer,
    "Lightning": lightning,
    "Training": training,
    "baked project": baked,
    "exact": partial(baked, exact="true"),
}

if __name__ == "__main__":
    import clock

    warnings.simplefilter("ignore")
    todo = Work(**json.loads(os.environ["BENCH_WORK"]))
    clock.install(todo)
    PEERS[sys.argv[1]](todo)
