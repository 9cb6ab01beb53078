"""What makes a GPU idle: waits of the CPU for it, graph breaks, and compilations, in every task."""

import copy
import json

import pytest
import torch

from conftest import load_task, prepare_task
from samestep.models import attention
from samestep.project import contract
from waits import host_waits

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
WORDS = "the quick brown fox jumps over the lazy dog and runs away again".split()
KINDS = ["causal_lm", "causal_lm packed", "text_classification", "seq2seq", "image_classification"]
KINDS += ["preference"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives the module of a task, its model, and a function for batches of these rows."""
    folder, known = tmp_path_factory.mktemp("waits"), {}
    texts = [" ".join(WORDS[: 1 + i % 13] * (1 + i % 7)) for i in range(300)]
    tables = {
        "text_classification": [{"text": t, "label": "ab"[i % 2]} for i, t in enumerate(texts)],
        "seq2seq": [{"source": f"{i} {t}", "target": f"{t} {i}"} for i, t in enumerate(texts)],
        "preference": [
            {"prompt": f"{i}", "chosen": t, "rejected": f"{t} {i}"} for i, t in enumerate(texts)
        ],
        "causal_lm": [{"text": f"{i} {t}"} for i, t in enumerate(texts)],
        "causal_lm packed": [
            {"prompt": f"{i} + 1 =", "completion": t} for i, t in enumerate(texts)
        ],
    }

    def make(kind):
        if kind not in known:
            task = load_task(kind.split()[0])
            fields = {**SMALL, "cache_dir": str(folder / "cache")}
            if kind in tables:
                file = folder / f"{kind}.jsonl"
                file.write_text("\n".join(map(json.dumps, tables[kind])), encoding="utf-8")
                fields |= {"data": str(file), "vocab_size": 300}
            cfg = task.TaskConfig(**fields)
            prepared = prepare_task(task, cfg)
            torch.manual_seed(0)
            train, validation = task.views(cfg, prepared)
            make.settings[kind] = cfg, prepared
            known[kind] = task, task.build_model(cfg, prepared).train(), train, validation
        task, model, *parts = known[kind]

        def batch_of(ids, part=0):
            bound = contract.bind(task, *make.settings[kind])
            return bound.collate([parts[part][i] for i in ids])

        return task, copy.deepcopy(model), batch_of

    make.settings = {}  # what export gets
    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_makes_the_cpu_wait_for_nothing(made, kind):
    task, model, batch_of = made(kind)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    batches = [batch_of(range(8)), batch_of([0])]  # with padding, and without
    evaluated = batch_of(range(8), part=1)
    with host_waits() as found:
        for batch in batches:
            task.loss_sum(model, batch).backward()
        task.eval_sums(model, evaluated)
    assert found == []


@pytest.mark.parametrize("kind", ["text_classification", "seq2seq"])
def test_a_mask_in_every_batch_changes_nothing(made, kind, tmp_path):
    task, model, batch_of = made(kind)
    settings = made.settings[kind]
    own = copy.deepcopy(model)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would plan anew for each length
    assert model.config._attn_implementation == attention.MASKED
    own.set_attn_implementation("sdpa")
    for batch in (batch_of(range(8)), batch_of([0])):
        losses = []
        for each in (model, own):
            each.zero_grad()
            losses.append(task.loss_sum(each.eval(), batch))
            losses[-1].backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    with host_waits() as found:
        task.loss_sum(own, batch)
    assert found and {*found} == {"aten._local_scalar_dense.default"}
    if kind == "seq2seq":
        inputs = {name: batch_of(range(4))[name] for name in ("input_ids", "attention_mask")}
        answers = [each.generate(**inputs, max_new_tokens=6) for each in (model, own)]
        assert torch.equal(*answers)
    task.export(model, tmp_path, *settings)
    assert attention.MASKED not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"] is None


def test_a_model_whose_answers_would_change_keeps_its_attention(made):
    task, model, _ = made("text_classification")
    tokenizer = lambda *_, **__: {"input_ids": torch.tensor([[3, 4, 5]])}  # noqa: E731
    calls = []

    def other(texts):
        calls.append(0)
        return torch.full((1,), float(len(calls)))

    def fails(texts):
        raise RuntimeError("of its own")

    model.set_attn_implementation("sdpa")
    for logits in (other, fails):
        assert not attention.always_mask(model, tokenizer, logits)
        assert model.config._attn_implementation == "sdpa" and model.training


# ---- Compiled ------------------------------------------------------------------------------------
