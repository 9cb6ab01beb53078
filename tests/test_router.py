"""Mixtures of experts: the router's loss is trained on, as transformers adds it."""

import pytest
import torch
import transformers

import same
from conftest import bake, copy_until, load_task
from samestep.models import next_token, preferences
from test_next_token import LENGTH, SIZES, check_same, gradients, prepared, rows

EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip


def make(family="Qwen3Moe", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **EXPERTS, **more})
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("family, padded", [("Qwen3Moe", False), ("Mixtral", True)])
def test_loss_and_gradients_of_a_micro_batch_are_those_of_transformers(family, padded, capsys):
    model, batch = make(family), rows(False)
    fast = prepared(model, False)
    assert "includes its router's loss (router_aux_loss_coef 0.5)" in capsys.readouterr().out
    batch["labels"][0, 20 if padded else LENGTH :] = -100
    mask, items = (batch["labels"] != -100).long(), next_token.counted(batch).sum().item()
    for given in ({**batch, "attention_mask": mask}, batch):
        expected = items * model(**given).loss
        known = gradients(model, expected)
        found = next_token.loss_sum(fast, given)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        check_same(known, gradients(fast, found), rel=3e-6)
    pure = next_token.loss_sum(prepared(make(family, router_aux_loss_coef=0.0), False), batch)
    assert not capsys.readouterr().out and found - pure > 0.4 * items
    nothing = next_token.loss_sum(fast, {**batch, "labels": torch.full((3, LENGTH), -100)})
    assert nothing == 0 and all((g == 0).all() for g in gradients(fast, nothing).values())
    assert next_token.loss_sum(fast.eval(), batch).item() == pytest.approx(pure.item())


def test_each_pair_has_the_router_s_loss_of_both_answers():
    task, model, batch = load_task("preference"), prepared(make(), False), rows(False)
    preferences.add_reference(model)
    model.objective = task.TaskConfig()
    pairs = {name: torch.stack([values[:2], values[1:]]) for name, values in batch.items()}
    ids = preferences.flatten_pairs(pairs)["input_ids"]
    expected = 2 * 0.5 * model(input_ids=ids).aux_loss
    found = task.loss_sum(model, pairs)
    model.config.output_router_logits = False
    pure = task.loss_sum(model, pairs)
    assert (found - pure).item() == pytest.approx(expected.item(), rel=1e-5)
    known, alone, both = (gradients(model, loss) for loss in (expected, pure, found))
    check_same({name: alone[name] + known.get(name, 0) for name in alone}, both, rel=3e-6)


@pytest.mark.slow
def test_runs_include_it_on_any_processes_and_resume_to_the_same_bytes(tmp_path):
    project, folder = bake(tmp_path, pictures=False, tracker="none"), tmp_path / "base" / "model"
    steps = "--max_steps 6 --global_batch_size 8 --warmup_steps 2 --save_every 3 --log_every 1"
    flags = [*steps.split(), "--keep_checkpoints", 0, "--micro_batch_size", 2, "--output_dir"]
    small = ["--task.hidden_size", 32, "--task.vocab_size", 300, "--max_steps", 1]
    project.train(1, *flags, tmp_path / "base", *small)
    make(vocab_size=300).save_pretrained(folder)
    more = ["--task.model_name_or_path", folder, "--exact", "true"]
    for name, processes in (("two", 2), ("one", 1), ("half", 1)):
        if name == "half":
            copy_until(tmp_path / "two", 3, tmp_path / name)
        printed = project.train(processes, *flags, tmp_path / name, *more)
        assert "includes its router's loss" in printed
    same.check_same(*(tmp_path / name for name in ("two", "one", "half")))
