"""Processes that share rows train as one process does. What the kernels of CUDA do is not shown."""

import contextlib
import functools
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import test_sharding
from conftest import load_task
from samestep.checkpoint import weights
from samestep.models import next_token
from samestep.processes import ranks
from samestep.settings import mesh as layout
from samestep.settings.run_config import DDPConfig
from samestep.start import startup
from samestep.step import sharding
from test_sharding import agree, curve, make_small, train

alone = test_sharding.alone  # a fixture: a run of one process


SHARED = layout.layout_of(2, 1, ("FSDP", "PARALLELISM_CONFIG"), {"cp": 2})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A project with a small language model, and a YAML for two replicas of two processes."""
    fields = {"max_steps": 4, "eval_every": 2, "save_every": 2, "learning_rate": 0.001}
    baked = make_small(tmp_path_factory.mktemp("small"), **fields)
    config = baked.path / "configs" / "accelerate"
    text = (config / "context_parallel.yaml").read_text()
    two, four = "parallelism_config_dp_shard_size: 1", "parallelism_config_dp_shard_size: 2"
    assert two in text
    (config / "context_parallel_2x2.yaml").write_text(text.replace(two, four))
    return baked


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [("context_parallel", 2), ("context_parallel_2x2", 4, "--gradient_checkpointing=true")]
)
def test_losses_norms_and_evaluations_are_those_of_one_process(small, alone, tmp_path, case):
    """A replica has two or four micro-batches in a step. One process continues the run."""
    train(small, *case, "--output_dir", tmp_path / "run")
    agree(tmp_path / "run", alone, norm=1e-6)
    first, shared = (curve(output) for output in (alone, tmp_path / "run"))
    for step in (2, 4):
        for name in ("unigram_loss", "bits_per_byte"):  # from columns with one number a row
            assert shared[step][name] == pytest.approx(first[step][name], rel=1e-6)
    if case[1] == 2:
        saved = tmp_path / "run" / "checkpoints" / "step-00000002"
        train(small, "cpu", 1, "--resume", saved, "--output_dir", tmp_path / "continued")
        last = curve(tmp_path / "continued")[4]
        assert last["batch_hash"] == first[4]["batch_hash"]
        for name in ("loss", "eval_loss"):
            assert last[name] == pytest.approx(first[4][name], rel=1e-6)


# ---- Batches and their parts ---------------------------------------------------------------------


class Part:
    """Stands for the accelerator of one of two processes that have a part of each sequence. They
    are threads, and torch's context parallelism is what it does to a batch."""

    parallelism_config = types.SimpleNamespace(cp_enabled=True)
    device, mixed_precision = torch.device("cpu"), "no"

    def __init__(self, rank):
        self.rank = rank
        self.torch_device_mesh = {"cp": self}

    def size(self):
        return 2

    def get_local_rank(self):
        return self.rank

    def get_group(self):
        return None

    @contextlib.contextmanager
    def maybe_context_parallel(self, buffers, buffer_seq_dims, no_restore_buffers):
        for each in buffers:
            quarters = each.chunk(4, 1)
            part = torch.cat([quarters[self.rank], quarters[3 - self.rank]], 1)
            each.resize_(part.shape).copy_(part)
        yield


def both(monkeypatch, function):
    """What function(accelerator) returns, or the error that it raises, on both processes."""
    meeting, values = threading.Barrier(2, timeout=10), [None, None]

    def all_reduce(tensor, group):
        values[meeting.wait()] = tensor.clone()
        meeting.wait()
        tensor.copy_(values[0] + values[1])
        meeting.wait()

    def run(rank):
        try:
            return function(Part(rank))
        except ranks.UserError as error:
            return error

    monkeypatch.setattr(sharding.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(sharding, "sdpa_kernel", lambda _: contextlib.nullcontext())
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, range(2))]


def make_batch(length=8):
    ids = torch.arange(3, 3 + 2 * length).view(2, length)
    return {"input_ids": ids, "labels": ids.clone(), "bytes": torch.tensor([5, 7])}


def test_parts_of_a_batch_have_the_labels_that_follow(monkeypatch):
    def split(accelerator):
        batch = make_batch()
        with sharding.split_rows(accelerator, batch):
            return batch

    for rank, batch in enumerate(both(monkeypatch, split)):
        places = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
        assert batch["position_ids"].tolist() == 2 * [places]
        assert batch["input_ids"].tolist() == [[3 + i for i in places], [11 + i for i in places]]
        following = batch["input_ids"] + 1
        if rank == 0:
            following[:, -1] = -100
        assert torch.equal(batch["shift_labels"], following)
        assert batch["bytes"].tolist() == ([0, 0] if rank else [5, 7])
        assert torch.equal(next_token.shift_labels(batch), following)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_a_mask_or_positions_beside_a_batch_are_refused(name, monkeypatch):
    def split(accelerator):
        with sharding.split_rows(accelerator, make_batch() | {name: torch.ones(2, 8)}):
            raise AssertionError

    for error in both(monkeypatch, split):
        assert (
            f"context parallelism: the parts of a sequence see no {name}, and task.c" in f"{error}"
        )


class NextToken(torch.nn.Module):
    """Predicts a token from the one before it alone. It calls functions as the prepared module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.logits = torch.nn.Embedding(600, 600)

    def forward(self, function, batch):
        return function(self, batch)


def loss_sum(model, batch):
    logits, labels = model.logits(batch["input_ids"]), next_token.shift_labels(batch)
    return next_token.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifts_parts(model, batch):
    return loss_sum(model, {"input_ids": batch["input_ids"], "labels": batch["labels"]})


def sums(count, model, batch):
    return {"tokens": count(batch).sum(), "bytes": batch["bytes"].sum()}


def test_sums_over_parts_are_compared_with_those_of_a_sequence(monkeypatch):
    cases = [
        ({"loss_sum": loss_sum}, None),
        ({"eval_sums": functools.partial(sums, next_token.counted)}, None),
        ({"loss_sum": loss_sum, "other": shifts_parts}, "task.other is "),
        (
            {"eval_sums": functools.partial(sums, lambda batch: batch["labels"][:, 1:] != -100)},
            "task.eval_sums['tokens'] is 127 for a sequence, and 126 added up over its parts",
        ),
    ]
    model = NextToken()
    for functions, said in cases:
        batch = make_batch(256)

        def check(accelerator, functions=functions, batch=batch):
            sharding.check_parts(accelerator, model, functions, batch)

        for error in both(monkeypatch, check):
            assert (error is None) if said is None else f"context parallelism: {said}" in f"{error}"
        assert batch.keys() == make_batch().keys() and batch["input_ids"].shape == (2, 256)


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("rows", "chat", "task.rows is 'chat' but must be text under context parallelism: packed"),
        ("packing", "best_fit", "must be stream under context parallelism"),
        ("dropout", 0.1, "task.dropout is 0.1 but must be 0 under context parallelism"),
        ("lora_dropout", 0.1, "task.lora_dropout is 0.1 but must be 0 under context parallelism"),
        ("attn_implementation", "eager", "must be sdpa under context parallelism"),
    ],
)
def test_settings_under_which_rows_cannot_be_shared(field, value, said, tmp_path):
    task = load_task("causal_lm")
    task.check_context_parallel(task.TaskConfig(rows="text"))
    with pytest.raises(ValueError, match=said):
        task.check_context_parallel(task.TaskConfig(**{"rows": "text", field: value}))


@pytest.mark.parametrize("name", ["text_classification", "seq2seq", "image_classification"])
def test_other_tasks_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="task.py has no function check_context_parallel"):
        startup.check_rows([{}], load_task(name), 4)


def test_compile_and_exact_are_refused():
    off = {"exact": False, "compile": False, "device_shares": "equal"}
    for field in ("exact", "compile"):
        off |= {"gradient_compression": "none", "ddp": DDPConfig()}
        cfg = types.SimpleNamespace(**off | {field: True})
        with pytest.raises(ValueError, match=f"^{field} does not go with .*context paralleli"):
            startup.check_sharing(cfg, SHARED)


def llama(attention="sdpa", **fields):
    """A model of one layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

    kind = MistralConfig if "sliding_window" in fields else LlamaConfig
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind(vocab_size=32, intermediate_size=16, num_key_value_heads=2, **sizes, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_models_that_would_be_trained_wrongly_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    cases = [
        (llama("eager"), "LlamaForCausalLM computes attention by eager; it needs sdpa"),
        (llama(attention_dropout=0.1), "LlamaForCausalLM has dropout"),
        (torch.nn.Sequential(torch.nn.Dropout(0.1)), "Sequential has dropout"),
        (llama(rope_parameters=rope), "the rotary embedding of LlamaForCausalLM depends"),
    ]
    mixture = llama()
    mixture.config.output_router_logits = True
    cases.append((mixture, "the router's loss of LlamaForCausalLM .* needs whole rows; use fsdp2"))
    sharding.check_model_shares_rows(llama(), SHARED)
    for model, said in cases:
        sharding.check_model_shares_rows(model, layout.Layout(2))
        with pytest.raises(ranks.UserError, match=f"^context parallelism: {said}"):
            sharding.check_model_shares_rows(model, SHARED)


def test_accelerate_refuses_sliding_windows():
    """It reads them from the config of the module that train.py prepares."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(weights.TaskModule(llama()))
    with pytest.raises(ValueError, match="does not support attention layers of type"):
        _attach_context_parallel_hooks(weights.TaskModule(llama(sliding_window=4)))
