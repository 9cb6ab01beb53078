"""Training in your own Accelerate script: kill it at any time, and run the same command again.

    model, optimizer = accelerator.prepare(model, optimizer)
    given = dict(seed=0, global_batch_size=32, micro_batch_size=8, settings=vars(args))
    training = Training(accelerator, model, optimizer, rows, folder="runs/mine", **given)
    for step in training.steps(max_steps=1000, save_every=200):  # resumes
        for batch in step:
            with accelerator.accumulate(model):
                step.backward(lambda: model(**batch).loss, mean=True)
        step.clip(1.0)
        optimizer.step()

It is no Trainer: the loop, the loss and the optimizer's step are the script's own. train.py is such
a script.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate

from samestep.base import run_folder
from samestep.base.console import print_on_main
from samestep.base.launching import STOPPED
from samestep.processes import alike
from samestep.processes.failures import Ended
from samestep.report import speed
from samestep.state import built, checkpoints, consistency, provenance
from samestep.state.mirror import Mirror
from samestep.state.saver import Saver
from samestep.state.weights import TrainingState
from samestep.step.evaluation import Evaluation
from samestep.step.loader import StepLoader
from samestep.step.model import bare_model
from samestep.step.samples import SampleDataset
from samestep.step.seeds import BEFORE, seed_micro_batch
from samestep.step.step import Step, watch_optimizer
from samestep.training import rehearsal, replay, script
from samestep.training.log import RunLog
from samestep.training.memory import Memory
from samestep.training.resume import ResumePoint
from samestep.training.search import find_size
from samestep.training.trial import try_loop


class Training:
    """A run of a prepared model and its optimizer. All processes make it, and use it alike.

    rows: a dataset with len() and [i].
    folder: of the run. `checkpoints`, `metrics.jsonl` and `status.json` lie in it.
    seed: of the order of the rows, of what is drawn in a step, and of the generators from here on.
    global_batch_size: rows of a step, over all processes; micro_batch_size: of a batch, at most;
        auto: as many as fit into memory, and fewer where it runs out.
    collate(list of rows): a batch.
    count(batch): its items in the loss, from its labels alone; without it the number of its rows.
    settings: those that determine the result; a run that resumes must have the same.
    exact: whether the weights are bitwise the same on any number of processes.
    augment(row, generator): the row for training; draws from this generator.
    keep_checkpoints: the newest so many; 0: all. keep_every: those of such steps for good; 0: none.
    async_save: whether checkpoints are written in the background, from a copy in host memory.
    num_workers: processes that fetch rows ahead; 0: this process does.
    log_every: steps between two lines of metrics.jsonl, for which a step waits for the device.
    max_skipped_steps: so many in a row that are not finite end the run; 0: any number may be.
    rows_depend: whether the loss of a row depends on others by intent.
    accept_changes: whether a run resumes with other settings.
    mirror: URL of a copy of the folder that outlives the machine, as s3://bucket/runs/mine.
    mirror_grace: seconds after a signal in which the checkpoint of a stop is copied there.
    run: what train.py has prepared before the processes met; None in a script of one's own.
    """

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: Any, rows: Any, *,
        folder: str | Path, seed: int, global_batch_size: int, micro_batch_size: int | str,
        collate: Callable = default_collate, count: Callable | None = None,
        settings: dict | None = None, exact: bool = False, augment: Callable | None = None,
        keep_checkpoints: int = 3, keep_every: int = 0, async_save: bool = False,
        num_workers: int | None = 0, log_every: int = 1, max_skipped_steps: int = 10,
        rows_depend: bool = False, accept_changes: bool = False, mirror: str = "",
        mirror_grace: int = 25, run: Any = None,
    ):  # fmt: skip
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.folder, self.seed, self.exact = Path(folder), seed, exact
        self.keep_checkpoints, self.keep_every = keep_checkpoints, keep_every
        self.async_save, self.num_workers, self.log_every = async_save, num_workers, log_every
        self.max_skipped_steps, self.rows_depend = max_skipped_steps, rows_depend
        self.accept_changes, self.begins_from = accept_changes, "auto"
        # Functions of the run and of a step, which give other batches before those of the step.
        self.trials: list[Callable[[Any, Step], Iterator[Any]]] = [try_loop]
        if question := replay.read_question():
            replay.Replay(self, question)  # takes the place of some methods
        if question := rehearsal.read_question():
            rehearsal.Rehearsal(self, question)
            if run is None:
                given = global_batch_size, micro_batch_size, exact, question
                micro_batch_size = rehearsal.choose_size(*given)
                if exact and isinstance(settings, dict):  # which must have the same
                    settings = {**settings, "micro_batch_size": micro_batch_size}
        self.lock: run_folder.RunLock | None = None  # of the folder, on the main process
        kept = keep_checkpoints, keep_every
        self.mirror = run.mirror if run else Mirror(mirror, self.folder, *kept, grace=mirror_grace)
        if run is None:
            run = script.Script(
                self, rows, global_batch_size, micro_batch_size, settings or {},
                {"collate": collate, "count": count, "augment": augment},
            )  # fmt: skip
        self.prepared = [p.requires_grad for p in model.parameters()]  # which weights train
        self.run, self.ranks, self.plan, self.task = run, run.ranks, run.plan, run.task
        self.manifest: dict[str, Any] = run.manifest  # the entries that all checkpoints have
        self.rows = SampleDataset(rows, self.task, seed, run.mixture)
        self.meter = speed.SpeedMeter(accelerator, self.ranks, run.unit)
        self.memory: Memory | None = None  # of micro_batch_size auto
        self.attempt: Callable = contextlib.nullcontext  # what may run out of memory; see there
        if self.plan.is_auto:
            self.memory = Memory(self)
            self.attempt = self.memory.attempt
            self.trials.insert(self.trials.index(try_loop), find_size)
        self.exported = model  # what is evaluated and exported: an average of the weights may be
        self.modules = 0  # that were loaded at the last save
        self.has_looked = False  # at what the first step changes
        self.step = 0  # the number of steps that are done
        self.scores: dict[str, float] | None = None  # of the newest step, once it is evaluated
        self.current: Step | None = None
        self.gradients: Any = None  # see step.gradient; made when the loop was tried
        self.point = ResumePoint()
        self.saver: Saver | None = None
        self.loader: StepLoader | None = None
        self.metrics: RunLog | None = None  # while steps are computed
        self.evaluated: Evaluation | None = None  # the newest: its workers are kept
        watch_optimizer(self)

    # ---- The start

    def resume(self) -> int:
        """Load the newest checkpoint in the folder, unless that was done; return the steps done.

        Prepare or register schedulers, and what else has a state, before.
        """
        run = self.run
        for scheduler in self.accelerator._schedulers:
            # accelerate would let it make a step for each process (huggingface/accelerate#1382).
            scheduler.split_batches = True
        if self.saver:
            return self.step
        self.point = point = run.find_start(self)
        self.lock = run.lock
        if self.memory and (size := self.ranks.from_main(point.micro_batch_size)):
            self.memory.use(size)
            print_on_main(f"{run.label}micro_batch_size auto: as before, {self.plan.describe()}")
        with self.ranks.fail_together():
            prepared = self.accelerator, self.model, self.optimizer
            options = run.optimizer_settings, run.sets_lr, self.exact
            state = TrainingState(*prepared, self.ranks, *options)
            if run.watches_rows:
                rows = self.rows.dataset
                state.inventory.watch_rows(rows, self.num_workers, run.by_reading)
        self.manifest |= built.describe(state)
        saver = Saver(
            self.folder, self.ranks, state, self.manifest, self.lock, self.mirror,
            keep=self.keep_checkpoints, keep_every=self.keep_every, in_background=self.async_save,
        )  # fmt: skip
        if point.checkpoint:
            with self.ranks.fail_together():
                given = point.checkpoint, point.saved, self.manifest, self.accept_changes
                changed = built.compare(state, *given)
            point.changed |= changed
            for line in provenance.describe_changes(changed):
                print_on_main(f"changed since the checkpoint: {line}")
            saver.restore(point.checkpoint, point.saved)
            print_on_main(f"{run.label}{run.verb} {point.checkpoint}")
        else:
            with self.ranks.fail_together():
                if saver.main:  # AdamW will keep two moments of each weight
                    checkpoints.check_disk_space(saver.folder, 3 * run.trained_bytes)
        alike.check_alike(self.ranks, self.model, "at the start")
        self.step, samples = saver.step, self.samples(saver.step)
        history = provenance.extend_history(point.saved, self.manifest, self.step, samples)
        self.manifest["history"] = history
        if "eval_loss" in point.saved and point.same_validation(self.manifest):
            self.scores = {"eval_loss": point.saved["eval_loss"]}
        saver.best = point.best
        saver.takes_scores = point.in_folder and self.scores is None and not point.changed
        if self.rows.is_stream:
            lanes = point.saved.get("lanes")
            self.rows.dataset.begin(self.seed, self.plan.samples, samples, lanes)
        self.saver = saver  # not before: what fails half restored is restored again
        return self.step

    def open_log(self, max_steps: int) -> RunLog:
        if not self.metrics:
            self.metrics = RunLog(self, max_steps)
            self.metrics.note(started=provenance.describe_start(self.manifest))
            if self.point.changed:
                self.metrics.note(event="changed", changes=self.point.changed)
        return self.metrics

    def lacks_scores(self, every: int | str, max_steps: int) -> bool:
        """Return whether the step that the run resumes from has yet to be evaluated, since a kill
        came before: score it then, before the next step."""
        number = self.resume()
        step = Step(self, number, [], 0, last=number >= max_steps)
        lacks = number > 0 and self.scores is None and step.due(every)
        if lacks:
            self.run.stop.start()
            self.open_log(max_steps)
        return lacks

    # ---- The loop

    def steps(self, max_steps: int, save_every: int = 0) -> Iterator[Step]:
        """Yield the steps that are left. Save every so many (0: none) and the last.

        After a signal it saves the step and exits with code 75: the same command continues.
        """
        script.check_whole(0, max_steps=max_steps, save_every=save_every)
        self.resume()
        self.write_status("running")
        begin = self.complete()
        left = max(max_steps - begin, 0)
        log = self.open_log(max_steps)
        self.run.stop.start()  # from here on signals are flags
        try:
            event = self.run.prepare_steps(self)  # may assign micro-batches anew: self.plan
            log.monitor.plan = self.plan
            if event:
                log.note(**event)
            self.loader = StepLoader(self, first=self.samples(begin), steps=left)
            is_training = bare_model(self.accelerator, self.model).training
            if not is_training:
                print_on_main("the model was in eval mode; now all of it is in train mode")
            if not is_training or self.run.sets_modes:
                self.model.train()
            self.meter.start()
            self.loader.prefetch()
            for number in range(begin + 1, begin + left + 1):
                log.start_step(number)
                self.ranks.places.start_step(number)
                seed_micro_batch(self.seed, number, BEFORE)
                micro_batches, facts = self.loader.next_step()
                self.meter.add(facts.num_items, facts.ids_hash, self.loader.tokens)
                is_last = number == max_steps
                self.current = Step(self, number, micro_batches, facts.num_items, is_last)
                yield self.current
                self.complete()
                if not self.has_looked:
                    self.look()
                if self.loader.should_stop():
                    self.end_stopped()
                if self.current.is_last or (save_every and number % save_every == 0):
                    self.save()
            if any(self.ranks.sum_over_ranks(self.run.stop.requested())):  # in the last step
                self.end_stopped()
            self.run.end_loop(self, "finished")
            self.current = None  # the optimizer is the script's again
        except GeneratorExit:  # a break, or an error, which is told elsewhere
            self.run.end_loop(self, "stopped")
            raise
        finally:
            self.run.stop.end()

    def look(self) -> None:
        """Collect what a checkpoint of the first step would hold: what cannot be saved ends the run
        now. A step that fp16 skips changes nothing."""
        skipped = self.accelerator.scaler and self.optimizer.step_was_skipped
        if not skipped:
            self.has_looked = True
            assert self.saver
            self.saver.state.collect(self.step)

    def complete(self) -> int:
        """Return how many steps are done; raise UserError in the middle of one."""
        step = self.current
        if step and step.gradient != "not begun" and step.number != self.step:
            self.log(step)
        return self.step

    # ---- What a script does between two steps

    def log(self, step: Step, **values: Any) -> None:
        """Log a step whose weights are updated. Every `log_every` steps there is a line of
        metrics.jsonl, the tracker and the screen, with these values, numbers or texts.

        Without a call the loop does it, after the body.
        """
        metrics = self.open_log(self.step)
        if values:
            values = script.plain_values(values, script.NOT_VALUES)
        if self.step == step.number:  # its line may be written
            if values:
                metrics.note(**values)
            return
        step.check_complete()
        self.step, self.scores = step.number, None
        metrics.add(step, values)
        if step.due(self.log_every):
            metrics.write_means()
        self.note_commits()

    def note_commits(self) -> None:
        """Write a line about each save in the background that is now done."""
        for line in self.saver.take_committed() if self.saver else ():
            if self.metrics:
                self.metrics.note(**line)

    def save(self) -> None:
        """Save a checkpoint of the newest step, unless there is one; before a `break`, too.

        What follows it in the body, such as scheduler.step(), is not in the checkpoint.
        """
        self.resume()
        self.complete()
        self._save()

    def _save(self) -> None:
        """Save the newest step, which is complete, unless it is saved."""
        step, saver = self.step, self.saver
        assert saver
        if step == saver.step:
            return
        self.ranks.places.meet("training.save()", step)
        self.write_line()  # all lines of a step before its checkpoint
        if len(sys.modules) != self.modules:  # of the project some may be imported late
            self.modules, code = len(sys.modules), self.manifest["code"]
            code |= {**consistency.hash_project(self.run.project), **code}
        began = time.perf_counter()
        with self.meter.paused():
            lanes = self.loader.all_lanes() if self.loader else None
            entries = saver.save(step, self.samples(step), lanes)
        if self.metrics:
            self.metrics.note(save_seconds=time.perf_counter() - began, **entries)
        if self.scores:  # it was evaluated before
            saver.add_scores(step, self.scores)

    def write_line(self) -> None:
        """Write a line about the steps since the last one."""
        if self.metrics:
            self.metrics.write_means()

    def score(self, scores: dict[str, float]) -> None:
        """Log the scores of the newest step, and add them to its checkpoint, if it has one.

        The best step is that with the smallest `eval_loss`; its checkpoint stays.
        """
        step = self.complete()
        self.scores = script.plain_values(scores, script.NOT_SCORES)
        self.write_line()
        self.open_log(step).note(**self.scores)
        assert self.saver
        self.saver.add_scores(step, self.scores)

    def evaluation(self, rows: Any, collate: Callable | None = None) -> Evaluation:
        """Return the batches of an evaluation of these rows, each once, over all processes.

        A signal ends it, and the process exits with code 75, if the newest step is saved. What
        follows in the body may change more of a step that is not: then it is answered after it.
        """
        self.resume()
        step = self.complete()
        self.ranks.places.meet("an evaluation", step)
        self.write_line()
        requested = self.run.stop.requested
        if not self.run.evaluates_last and self.saver and self.saver.step != step:
            requested = lambda: 0  # noqa: E731
        task = SimpleNamespace(collate=collate) if collate else self.task
        before = self.evaluated
        if not before or before.rows.dataset is not rows or before.task.collate != task.collate:
            self.evaluated = Evaluation(self, rows, task)
        return self.evaluated.start(requested)

    @torch.no_grad()
    def evaluate(
        self, rows: Any, eval_sums: Callable[[Any, Any], dict], collate: Callable | None = None
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Sum eval_sums(model, batch), a dict of tensors, over all rows, each once, in float64.

        collate: as that of Training, which it is unless one is given: without augmentation, say.
        """
        script.check_rows(rows)
        evaluation = self.evaluation(rows, collate)
        for batch in evaluation:
            evaluation.add(lambda batch=batch: eval_sums(self.exported, batch))  # type: ignore[misc]
        sums = evaluation.sums()
        return {name: sum(source[name] for source in sums) for name in sums[0]}  # type: ignore[misc]

    def load_best(self) -> int:
        """Load the weights of the best step, if there is one (see `score`); return the step."""
        self.resume()
        assert self.saver
        self.saver.wait()
        return self.saver.load_best() or self.step

    def samples(self, step: int) -> int:
        """Return the samples of the run up to the end of this step. Before the checkpoint that it
        resumes from, steps may have had another size."""
        saved = self.point.saved
        return saved.get("samples", 0) + (step - saved.get("step", 0)) * self.plan.samples

    def epochs(self, step: int) -> int:
        """Return the passes over the rows that are complete at the end of this step."""
        return self.samples(step) // len(self.rows)

    # ---- The end

    def end_stopped(self) -> None:
        """Save the newest step, and end this process with exit code 75, on all processes."""
        self._save()
        self.close()
        self.write_status("stopped", exit_code=STOPPED)
        self.mirror.upload(self.run.stop.left(self.mirror.grace))
        print_on_main(f"stopped after step {self.step}; the same command continues the run")
        self.run.end_stopped(self)
        raise Ended(STOPPED)

    def close(self) -> None:
        """Wait for the last save, and close the log."""
        self.write_line()
        if self.saver:
            self.saver.wait()
            self.note_commits()
        if self.metrics:
            self.metrics.lines.close()
        self.metrics = None

    def write_status(self, state: str, **more: Any) -> None:
        """Write the state of the run into its status, from the main process."""
        if self.lock and not self.lock.file.closed:  # another run of this process may have it
            run_folder.write_status(self.folder, state, **more)
