"""The task preference: which pairs it reads, its losses, its reference, and what it exports."""

import copy
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import lines, read_weights
from refusals import cases, refused
from same import check_same
from samestep.base.console import one_line
from samestep.data.sources import IncompleteRow
from samestep.models import preferences as references
from samestep.text import preferences
from test_sharding import train
from test_tasks import STEPS

# ---- Rows ----------------------------------------------------------------------------------------

CFG = SimpleNamespace(
    prompt_column="prompt",
    chosen_column="chosen",
    rejected_column="rejected",
    tools_column="tools",
)
PAIRS = cases("pairs")


@pytest.mark.parametrize("row", PAIRS)
def test_a_row_has_texts_or_messages_with_a_prompt_or_without(row):
    given = {name: row[name] for name in ("prompt", "chosen", "rejected") if row[name] is not None}
    if "said" in row:
        with refused(row["said"]) as error:
            preferences.normalize(given, CFG)
        is_incomplete = "equal" in row["said"] or "empty" in row["said"]
        assert isinstance(error.value, IncompleteRow) == is_incomplete
        return
    stored = preferences.normalize(copy.deepcopy(given), CFG)
    found = [stored[name] for name in ("prompt", "chosen", "rejected")]
    assert (list(map(json.loads, found)) if stored["is_chat"] else found) == row["read"]


def test_a_long_pair_loses_its_beginning_and_then_its_end():
    ids, mask = torch.arange(10).numpy(), (torch.arange(10) > 5).numpy()
    for limit, lost, kept in [(10, 0, 10), (8, 2, 8), (2, 5, 2)]:
        pair = preferences.truncate([(ids, mask), (ids[:8], mask[:8])], limit)
        assert pair[0][0].tolist() == [*range(lost, lost + kept)]
        assert pair[1][0].tolist() == [*range(lost, min(lost + kept, 8))]
        assert pair[0][1].any() and pair[1][1].any() and not pair[0][1][0]


def test_pairs_of_equal_answers_are_incomplete_rows(kit, prepare, capsys):
    rows = [dict(row) for row in kit.rows]
    rows[5]["rejected"] = rows[5]["chosen"]
    with pytest.raises(ValueError, match="line 6: both answers are equal; --task.incomplete_rows"):
        prepare(rows)
    rows[7]["chosen"] = "word " * 200
    _, _, parts = prepare(rows, max_length=64, incomplete_rows="skip")
    said = capsys.readouterr().out
    assert "; 1 left out (the first: " in said and sum(map(len, parts)) == 59
    assert "64 at most; 1 have 64, where rows are truncated\n" in said


# ---- Losses --------------------------------------------------------------------------------------


def answer_sums(model, batch):
    """The log-probability of each answer, and its number of tokens: (B, 2)."""
    ids, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "labels"))
    logs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :-1]
    counted = labels[:, 1:] >= 0
    chosen = logs.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return (chosen * counted).sum(1).view(-1, 2), counted.sum(1).view(-1, 2)


def by_hand(model, reference, batch, cfg):
    """The losses of the papers, from the logits of transformers."""
    own, sizes = answer_sums(model, batch)
    means = own / sizes
    if cfg.loss_type == "simpo":
        margin = cfg.beta * (means[:, 0] - means[:, 1]) - cfg.simpo_gamma
        losses = -F.logsigmoid(margin)
    else:
        ratios = own - answer_sums(reference, batch)[0]
        margin = cfg.beta * (ratios[:, 0] - ratios[:, 1])
        by_token = (ratios / sizes)[:, 0] - (ratios / sizes)[:, 1]
        losses = {
            "sigmoid": -(1 - cfg.label_smoothing) * F.logsigmoid(margin)
            - cfg.label_smoothing * F.logsigmoid(-margin),
            "hinge": (1 - margin).clamp(min=0),
            "ipo": (by_token - 1 / (2 * cfg.beta)) ** 2,
        }[cfg.loss_type]
    return (losses - cfg.rpo_alpha * means[:, 0]).sum()


@pytest.fixture
def moved(task, prepare, kit):
    """Makes a model that is no longer its reference, and a batch, with these settings."""

    def make(**fields):
        cfg, folder, (rows, _) = prepare(kit.rows, **fields)
        torch.manual_seed(0)
        model = task.build_model(cfg, folder)
        for weights in model.parameters():
            if weights.requires_grad:
                weights.data += 0.1 * torch.randn_like(weights)
        return cfg, folder, model, task.collate([rows[i] for i in range(6)])

    return make


TYPES: list[dict] = [
    {"label_smoothing": 0.2, "beta": 0.3}, {"loss_type": "hinge"}, {"loss_type": "ipo"},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7}, {"rpo_alpha": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("fields", TYPES)
def test_losses_and_gradients_are_those_of_the_papers(task, moved, fields):
    cfg, _, model, batch = moved(**fields)
    plain = copy.deepcopy(model)
    reference = plain._modules.pop("reference", None)
    assert (reference is None) == (cfg.loss_type == "simpo")
    losses = [task.loss_sum(model, batch), by_hand(plain, reference, batch, cfg)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    expected = {name: weights.grad for name, weights in plain.named_parameters()}
    for name, weights in model.named_parameters():
        if weights.requires_grad:
            bound = 1e-5 * float(expected[name].abs().max()) + 1e-9
            assert torch.allclose(weights.grad, expected[name], rtol=0, atol=bound), name
        else:
            assert name.startswith("reference.") and weights.grad is None


def test_scores_are_means_over_pairs_and_tokens(task, moved):
    cfg, _, model, batch = moved(beta=0.3)
    scores = task.metrics({n: v.double() for n, v in task.eval_sums(model, batch).items()})
    margin = scores["chosen_reward"] - scores["rejected_reward"]
    assert scores["margin"] == pytest.approx(margin) and scores["margin"] != 0
    model._modules.pop("reference")
    sums, sizes = answer_sums(model, batch)
    means = [scores["chosen_logp"], scores["rejected_logp"]]
    assert means == pytest.approx((sums / sizes).mean(0).tolist(), rel=1e-5)


def test_dropout_is_off_in_training(task, prepare, kit, tmp_path):
    """So the first loss is that of a model which is its reference."""
    cfg, folder, _ = prepare(kit.rows)
    model = task.build_model(cfg, folder)
    with references.without_reference(model):
        model.config.attention_dropout = 0.5
        model.save_pretrained(tmp_path / "base")
        kit.tokenizer(folder).save_pretrained(tmp_path / "base")
    cfg, folder, (rows, _) = prepare(kit.rows, model_name_or_path=str(tmp_path / "base"))
    model = task.build_model(cfg, folder).train()
    batch = task.collate([rows[i] for i in range(4)])
    scores = task.metrics({n: v.double() for n, v in task.eval_sums(model, batch).items()})
    assert scores["margin"] == scores["accuracy"] == 0
    assert task.loss_sum(model, batch).item() == pytest.approx(4 * math.log(2), rel=1e-6)
    task.export(model, tmp_path / "export", cfg, folder)
    assert AutoConfig.from_pretrained(tmp_path / "export").attention_dropout == 0.5


# ---- Runs ----------------------------------------------------------------------------------------

STEPS = [*STEPS, "--learning_rate", 0.01, "--warmup_steps", 1]


@pytest.fixture(scope="module")
def base(baked, kit):
    """A project with pairs, and a model in runs/base that was trained on them."""
    kit.write(baked.path)
    baked.pictures = False
    flags = ["--task.data", "rows.jsonl", *STEPS, "--task.rpo_alpha", 1.0]
    baked.train(1, *flags, *kit.flags(), "--output_dir", "runs/base")
    return baked


def flags_of(kind):
    flags = ["--task.data", "rows.jsonl", "--task.rpo_alpha", 0.0, *STEPS]
    flags += ["--task.model_name_or_path", "runs/base/model", "--task.max_length", 32]
    return flags + ["--task.lora_rank", 4] * (kind == "lora")


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def tuned(request, base):
    """A run from that model, on one process: all weights, or adapters."""
    output = base.path / "runs" / request.param
    printed = base.train(1, *flags_of(request.param), "--output_dir", output)
    return request.param, output, printed


def test_a_run_begins_at_its_reference_and_exports_no_copy_of_it(base, tuned):
    kind, output, _ = tuned
    losses = lines(output, "loss")
    assert losses[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert losses[-1]["loss"] < losses[0]["loss"]
    (file,) = (output / "model").glob("*.safetensors")
    saved = read_weights(output / "checkpoints/step-00000006")
    assert not any("reference" in name for name in [*load_file(file), *saved])
    first = load_file(base.path / "runs/base/model/model.safetensors")
    assert (kind == "lora") != (load_file(file).keys() == first.keys())


@pytest.mark.slow
def test_exact_has_the_same_bytes_on_any_processes_and_under_fsdp2(base, tmp_path):
    flags = [*flags_of("full"), "--exact", "true", "--micro_batch_size", 1, "--output_dir"]
    train(base, "cpu_multi", 3, *flags, tmp_path / "cpu_multi")
    train(base, "fsdp2", 2, *flags, tmp_path / "fsdp2")
    check_same(tmp_path / "cpu_multi", tmp_path / "fsdp2")


def test_the_report_has_the_answers_of_the_base(base, tuned):
    """Before, and those of the trained model after."""
    printed = tuned[2]
    model = AutoModelForCausalLM.from_pretrained(base.path / "runs/base/model")
    tokenizer = AutoTokenizer.from_pretrained(base.path / "runs/base/model")
    assert len(re.findall(r"^after \d: .* -> ", printed, re.M)) == 2
    shown = re.findall(r"^before \d: (.*) -> (.*)$", printed, re.M)
    assert len(shown) == 2
    for prompt, answer in shown:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(input_ids=tokens, max_new_tokens=60, do_sample=False)
        text = tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)
        assert one_line(text, 200) == answer
