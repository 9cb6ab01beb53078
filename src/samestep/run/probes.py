"""Checks of a task on a few rows, before the first step: a mistake shows now, not hours later.

Micro-batches are cut differently on other hardware. So the sums of rows together must be those of
each row alone: a mean in place of a sum, padding that is not masked, and negatives from the batch
are found. A language model must not see the token that it predicts.
"""

import contextlib
import math
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from samestep.base.console import print_on_main
from samestep.contract import contract
from samestep.step import context_parallel, outputs, seeds, trial
from samestep.step.inputs import IGNORE_INDEX, Batch, check_sums
from samestep.step.model import bare_model, eager, keep_modes
from samestep.step.samples import SampleDataset, collate
from samestep.training.trial import choose, complain, tolerance

_LIMIT_UNEQUAL = 0.01  # largest fraction of whole numbers that differ


def probe_task(run: Any, training: Any, draws: bool) -> None:
    """Check labels that are copied, eval_outputs and eval_sums, on all processes alike, after the
    loop was tried, which checks loss_sum: see training/trial.py. `draws`: whether loss_sum draws.

    Raises UserError where rows are not independent, in fp32; elsewhere, and where a run resumes, it
    is a warning.
    """
    model, validation = training.model, run.start.probes[1]
    if rounded := getattr(training.accelerator.unwrap_model(model), "rounded", ""):
        print_on_main(
            f"warning: task.loss_sum computes the loss in {rounded}, since it runs under autocast; "
            "call .float() on the outputs of the model"
        )
    with run.ranks.fail_together(), keep_modes(model), eager(model):
        model.eval()
        probe = _Probe(run, training)
        if not (probe.dependent or draws or run.ranks.layout.cp > 1):
            probe.check_labels(run.samples[-1])
        probe.check_outputs(validation)
        probe.check_sums(validation)
        probe.check_ends(run.rows)
        if run.ranks.layout.cp > 1:
            functions = {name: getattr(run.task, name) for name in ("loss_sum", "eval_sums")}
            whole = probe.batch(validation)
            context_parallel.check_parts(run.accelerator, model, functions, whole)


class _Probe:
    """A prepared model and the functions of its task."""

    def __init__(self, run: Any, training: Any):
        self.run, self.model, self.task = run, training.model, run.task
        self.training = training
        self.limit, self.ends = tolerance(training)
        self.outputs: Batch = {}  # of validation rows
        self.dependent = training.rows_depend

    def check_sums(self, samples: list[tuple]) -> None:
        """Check eval_sums on samples, and the metrics of their sums."""
        chosen = choose(samples, self.training)
        together = self.compute("eval_sums", chosen)
        if together.draws:
            print_on_main(
                "task.eval_sums draws random numbers without a row's generator: it is not checked "
                "that rows are independent"
            )
        elif not self.dependent:
            alone = [self.compute("eval_sums", [sample], i) for i, sample in enumerate(chosen, 1)]
            if problem := trial.differ("task.eval_sums", together, alone, self.limit):
                remedy = "give a sum over independent rows, or write rows_depend = True"
                complain(f"{problem}; {remedy}", self.ends)
        totals = {key: value.cpu().double() for key, value in together.sums.items()}
        metrics: Any = {"loss": 0.0}
        with contextlib.suppress(ArithmeticError, ValueError):  # undefined for so few rows
            given = [totals]
            if self.outputs:
                given.append(self.outputs)
            metrics = self.task.metrics(*given)
        contract.check_metrics(metrics)

    def compute(self, name: str, samples: list[tuple], number: int = 0) -> trial.Computed:
        """Compute the function for these samples. `number`: that of its random numbers."""
        device = self.run.accelerator.device
        seeds.seed_micro_batch(self.run.cfg.seed, 1, number)
        states = [trial.random_state(device)]
        batch, items, *_ = collate(self.task, samples)
        states.append(trial.random_state(device))
        batch = send_to_device(batch, device)
        sums = self.sums(name, batch)
        states.append(trial.random_state(device))
        return trial.Computed(batch, items, sums, states[2] != states[0], states[1] != states[0])

    def check_outputs(self, samples: list[tuple]) -> None:
        """Compare the outputs of rows together with those of each alone."""
        if not hasattr(self.task, "eval_outputs"):
            return
        chosen = choose(samples, self.training)
        before = trial.random_state(self.run.accelerator.device)
        self.outputs = self.rows_of([chosen])
        drawn = before != trial.random_state(self.run.accelerator.device)
        if drawn or self.dependent:
            return
        alone = self.rows_of([[sample] for sample in chosen])
        for name, values in self.outputs.items():
            one, limit = alone[name], self.limit
            if one.shape != values.shape:
                difference = math.inf
            elif not one.numel():
                continue
            elif one.is_floating_point():
                size = float(one.masked_fill(one == outputs.PADDING, 0).abs().max())
                difference = float((one - values).nan_to_num().abs().max())
                difference /= max(size, trial.SMALLEST)
            else:  # a few predictions of a new model may be as likely as others
                difference, limit = float((one != values).float().mean()), _LIMIT_UNEQUAL
            if difference > limit:
                complain(
                    f"task.eval_outputs: {name!r} of a row depends on the rows beside it (shape "
                    f"{(*values.shape,)} together, {(*one.shape,)} alone). Write -100 into the "
                    "padding of a batch (0 into unsigned integers, False into booleans)",
                    self.ends,
                )

    @torch.no_grad()
    def rows_of(self, groups: list[list[tuple]]) -> Batch:
        """Return the task's eval_outputs of these groups of samples, row by row."""
        parts, first = [], 0
        for group in groups:
            computed = self.model(self.task.eval_outputs, self.batch(group))
            parts.append(outputs.to_part(computed, np.arange(first, first + len(group))))
            first += len(group)
        return outputs.merge(parts, first)

    def batch(self, samples: list[tuple]) -> Batch:
        return send_to_device(collate(self.task, samples).batch, self.run.accelerator.device)

    @torch.no_grad()
    def sums(self, name: str, batch: Batch) -> dict[str, torch.Tensor]:
        """Return what the function gives for a batch; check it inside of the model: outside,
        accelerate has made all results float32."""
        function = getattr(self.task, name)

        def call(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
            result = function(model, batch)
            if name == "eval_sums":
                check_sums(result)
                return result
            return {"": result}

        with context_parallel.split_rows(self.run.accelerator, batch):
            return self.model(call, batch)

    def check_labels(self, sample: tuple) -> None:
        """Change the input of the last label: the loss of a language model must not change."""
        batch = self.batch([sample])
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if not torch.is_tensor(ids) or not torch.is_tensor(labels) or ids.shape != labels.shape:
            return
        counted = labels != IGNORE_INDEX
        config = getattr(bare_model(self.run.accelerator, self.model), "config", None)
        if not torch.equal(ids[counted], labels[counted]):  # a masked language model's differ
            return
        if getattr(config, "is_encoder_decoder", False) or not counted.any():
            return
        place = tuple(counted.view(-1, counted.shape[-1])[:1].nonzero()[-1:, 1].tolist())
        replacements = ids[ids != ids.flatten()[place[0]]] if place else ids[:0]
        if not replacements.numel():
            return
        before = self.sums("loss_sum", {**batch, "input_ids": ids.clone()})[""]
        ids = ids.clone()
        ids.view(-1, ids.shape[-1])[0, place[0]] = replacements[0]
        after = self.sums("loss_sum", {**batch, "input_ids": ids})[""]
        if float((after - before).abs()) > self.limit * max(float(before.abs()), trial.SMALLEST):
            complain(
                "task.loss_sum: the model sees the token that it is to predict: labels equal "
                "input_ids, and the loss of the last label changes with its own input; shift the "
                "labels, as transformers does where a model gets labels=, or mask the inputs",
                self.ends,
            )

    def check_ends(self, view: Any) -> None:
        """Warn where no row of 64 has a label for a token that ends a text: a model that generates
        would never stop (huggingface/transformers#23530). The main process reads them, no stream.
        """
        model = bare_model(self.run.accelerator, self.model)
        rows = SampleDataset(view, self.task)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = {*([ends] if isinstance(ends, int) else ends or [])}
        if rows.is_stream or not ends or not self.run.accelerator.is_main_process:
            return
        seen, labelled, lengths = set(), set(), set()
        for sample in rows.__getitems__(sorted({i * (len(view) - 1) // 63 for i in range(64)})):
            batch = collate(self.task, [sample]).batch
            ids, labels = batch.get("input_ids"), batch.get("labels")
            if not torch.is_tensor(ids) or not torch.is_tensor(labels):
                return
            counted = labels != IGNORE_INDEX
            if model.config.is_encoder_decoder:
                lengths |= {0, 1}  # each target is a whole text
            elif ids.shape != labels.shape or not torch.equal(ids[counted], labels[counted]):
                return
            lengths.add(ids.shape[-1])
            seen |= {*ids.flatten().tolist()}
            labelled |= {*labels[counted].tolist()}
        # Rows of one length without an end may be parts of long texts.
        if (ends & seen or len(lengths) > 1) and not ends & labelled:
            print_on_main(
                "warning: in 64 training rows no label is a token that ends texts (eos_token_id "
                f"{', '.join(map(str, sorted(ends)))}), so the model will not learn to stop. A "
                "data collator gives pad tokens no label: let pad_token differ from eos_token"
            )
