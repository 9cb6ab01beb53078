"""Training in your own Accelerate script: kill it at any time, and run the same command again.

    model, optimizer = accelerator.prepare(model, optimizer)
    given = {"global_batch_size": 32, "micro_batch_size": 8, "settings": vars(args)}
    training = Training(accelerator, model, optimizer, rows, folder="runs/mine", seed=0, **given)
    for step in training.steps(max_steps=1000, save_every=200):  # resumes
        for batch in step:
            step.backward(model(**batch).loss, mean=True)
        step.clip(1.0)
        optimizer.step()

It is no Trainer: the loop, the loss and the optimizer's step are the script's own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.errors import as_user_error
from samestep.base.launching import STOPPED
from samestep.processes.mesh import layout_of_accelerator
from samestep.processes.ranks import Ranks
from samestep.processes.stop import StopRequest, launcher_process
from samestep.state import checkpoints, provenance
from samestep.state.optimizers import settings_as_text
from samestep.state.saver import Saver
from samestep.state.weights import TrainingState
from samestep.step import inputs
from samestep.step.gradient import StepGradients
from samestep.step.loader import EvalLoader, StepLoader
from samestep.step.model import bare_model
from samestep.step.plan import plan_step
from samestep.step.samples import SampleDataset
from samestep.step.seeds import seed_micro_batch
from samestep.step.step import Step
from samestep.step.sums import EvaluationSums
from samestep.training import script


class Training:
    """A run of a prepared model and its optimizer. All processes make it, and use it alike.

    rows: a dataset with len() and [i].
    folder: of the run. `checkpoints` and `status.json` lie in it.
    seed: of the order of the rows, of what is drawn in a step, and of the generators from here on.
    global_batch_size: rows of a step, over all processes; micro_batch_size: of a batch, at most.
    collate(list of rows): a batch.
    count(batch): its items in the loss, from its labels alone; without it the number of its rows.
    settings: those that determine the result; a run that resumes must have the same.
    exact: whether the weights are bitwise the same on any number of processes.
    augment(row, generator): the row for training; draws from this generator.
    keep_checkpoints: the newest so many; 0: all.
    num_workers: processes that fetch rows ahead; 0: this process does.
    log_every: steps between two whose `loss` is computed, which waits for the device.
    rows_depend: whether the loss of a row depends on others by intent.
    accept_changes: whether a run resumes with other settings.
    """

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: Any, rows: Any, *,
        folder: str | Path, seed: int, global_batch_size: int, micro_batch_size: int,
        collate: Callable = default_collate, count: Callable | None = None,
        settings: dict | None = None, exact: bool = False, augment: Callable | None = None,
        keep_checkpoints: int = 3, num_workers: int = 0, log_every: int = 1,
        rows_depend: bool = False, accept_changes: bool = False,
    ):  # fmt: skip
        self.lock: run_folder.RunLock | None = None  # of the folder, on the main process
        script.end_in_one_line(self)  # first: it tells errors in status.json, too
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        script.check_whole(1, **sizes, log_every=log_every)
        numbers = {"seed": seed, "keep_checkpoints": keep_checkpoints, "num_workers": num_workers}
        script.check_whole(0, **numbers)
        script.check_rows(rows)
        script.check_prepared(accelerator, model, optimizer)
        if exact:
            script.prepare_exact(accelerator, model, optimizer)
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.folder, self.seed, self.exact = Path(folder), seed, exact
        self.keep_checkpoints, self.accept_changes = keep_checkpoints, accept_changes
        self.num_workers, self.log_every, self.rows_depend = num_workers, log_every, rows_depend
        layout = layout_of_accelerator(accelerator)
        self.ranks = Ranks(layout)
        self.plan = plan_step(
            global_batch_size, micro_batch_size, layout.replicas, exact,
            rank=layout.replica, in_step=layout.in_step,
        )  # fmt: skip
        given = {"collate": collate, "count": count, "augment": augment}
        self.task = SimpleNamespace(**{name: f for name, f in given.items() if f})
        self.rows = SampleDataset(rows, self.task, seed)
        self.few: list[tuple] = []  # rows to try the loop on: the shortest first, the longest last
        fixed = {"seed": seed, "global_batch_size": global_batch_size, "exact": exact}
        if exact:
            fixed["micro_batch_size"] = micro_batch_size
        self.manifest = script.describe(self, script.merge_settings(fixed, settings or {}))
        self.step = 0  # steps that are done
        self.not_finite = 0  # losses or gradients in a row
        self.norms: list[torch.Tensor] = []  # of the gradient of the newest step that was clipped
        self.saver: Saver | None = None
        self.gradients: StepGradients | None = None
        self.current: Step | None = None
        script.watch_optimizer(self)

    def resume(self) -> int:
        """Loads the newest checkpoint in the folder, unless that was done; the steps that are done.

        Prepare or register schedulers, and what else has a state, before.
        """
        script.adopt_schedulers(self.accelerator, self.optimizer)
        if self.saver:
            return self.step
        found: Any = (None, None, {}, [])
        with self.ranks.fail_together():
            if self.accelerator.is_main_process:  # one process: verifying reads all bytes
                found = self.lock_and_find()
        self.lock, found = found[0], found[1:]
        path, saved, lines = self.ranks.from_main(found)
        with self.ranks.fail_together():
            prepared = self.accelerator, self.model, self.optimizer
            state = TrainingState(*prepared, self.ranks.layout, sets_lr=False)
        self.manifest["optimizer"] = settings_as_text(state.settings)  # with those of schedulers
        saver = Saver(
            self.folder, self.ranks, state, self.manifest, self.keep_checkpoints, self.lock
        )
        print_on_main(f"{self.folder}: a step of {self.plan.describe()}")
        for line in lines:
            print_on_main(f"{self.folder}: {line}")
        if path:
            saver.restore(path, saved)
            self.step = saver.step
        samples = saver.samples(self.step)
        history = provenance.extend_history(saved, self.manifest, self.step, samples)
        self.manifest["history"] = history
        self.saver = saver  # not before: what fails half restored is restored again
        return self.step

    def lock_and_find(self) -> tuple:
        """Locks the folder, and finds the newest valid checkpoint in it: the lock, the path, its
        manifest, and lines to print."""
        lock, folder = self.lock or run_folder.RunLock(self.folder), self.folder / "checkpoints"
        path, saved, passed_over = checkpoints.find_checkpoint(folder, "auto")
        lines = [f"passed over: {reason}" for reason in passed_over]
        if path:
            _, changes = provenance.compare(path, saved, self.manifest, self.accept_changes, {}, {})
            lines += changes
            if line := provenance.hardware_line(saved["hardware"], self.manifest["hardware"]):
                lines.append(line)
            lines.append(f"continues from {path}")
        else:
            checkpoints.check_none_saved(self.folder)
        run_folder.write_status(self.folder, "running", saved=saved.get("step", 0))
        return lock, path, saved, lines

    def steps(self, max_steps: int, save_every: int = 0) -> Iterator[Step]:
        """The steps that are left. Saves every so many (0: none) and the last.

        Where a signal asks the run to stop, it saves the step and exits with code 75: the same
        command continues.
        """
        script.check_whole(0, max_steps=max_steps, save_every=save_every)
        self.resume()
        with self.ranks.fail_together():
            if self.lock and self.lock.file.closed:  # after the steps of another call
                self.lock = self.saver.lock = run_folder.RunLock(self.folder)
            self.write_state("running")
        begin = self.complete()
        left = max(max_steps - begin, 0)
        with StopRequest(launcher_process()) as stop:  # from here on signals are flags
            first, device = self.saver.samples(begin), self.accelerator.device
            loader = StepLoader(
                self.rows, self.task, self.plan, self.ranks, stop.requested, first, left,
                self.num_workers, device,
            )  # fmt: skip
            loader.prefetch()
            if not bare_model(self.accelerator, self.model).training:
                print_on_main("the model was in eval mode; now all of it is in train mode")
                self.model.train()
            for number in range(begin + 1, begin + left + 1):
                self.current = Step(self, number, loader)
                try:
                    yield self.current
                except GeneratorExit:  # a break; an error writes its own state
                    self.write_state("stopped")
                    raise
                step, stopped = self.complete(), loader.should_stop()
                if stopped or step == max_steps or (save_every and step % save_every == 0):
                    self.save()
                if stopped:
                    self.write_state("stopped", exit_code=STOPPED)
                    print_on_main(f"stopped after step {step}; the same command continues")
                    raise SystemExit(STOPPED)
        self.write_state("finished", exit_code=0)
        if self.lock:
            self.lock.file.close()  # lets others use the folder

    def write_state(self, state: str, **more: Any) -> None:
        """Writes the state of the run into its status, while the run has its folder."""
        if self.lock and not self.lock.file.closed:
            run_folder.write_status(self.folder, state, **more)

    def complete(self) -> int:
        """The steps that are done; raises UserError in the middle of one."""
        if self.current:
            script.check_complete(self.current)
            self.step = self.current.number
        return self.step

    def save(self) -> None:
        """Saves a checkpoint of the newest step: before a `break`, for instance.

        What follows it in the body, such as scheduler.step(), is not in the checkpoint.
        """
        self.resume()
        self.saver.save_step(self.complete())

    @torch.no_grad()
    def evaluate(self, rows: Any, eval_sums: Callable[[Any, Any], dict]) -> dict[str, torch.Tensor]:
        """Sums of eval_sums(model, batch), a dict of tensors, over all rows, each once: float64."""
        script.check_rows(rows)
        self.resume()
        loader = EvalLoader(rows, self.task, self.plan, self.ranks, 0, self.accelerator)
        totals = EvaluationSums(loader.sampler, self.accelerator.device)
        for batch in loader.batches(self.model):
            sums = eval_sums(self.model, batch)
            with as_user_error():
                inputs.check_sums(sums)
            totals.add(sums)
        # What the script draws from here on is the same on all processes.
        seed_micro_batch(self.seed, self.step + 1)
        found: list[dict[str, Any]] = totals.total(self.ranks)
        return {name: sum(each[name] for each in found) for name in found[0]}
