"""The loss of a language model, also of mixtures of experts: equal to that of a plain call."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from conftest import bake, copy_until, load_task
from refusals import cases
from same import check_same as check_same_runs
from samestep.models import next_token, preferences, pretrained
from small_models import word_tokenizer

LENGTH = 32
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = cases("models")
PLAIN = pretrained.ModelConfig()
check_separates_texts = next_token.check_separates_texts


@pytest.fixture(autouse=True)
def any_model(monkeypatch):
    """Models that cannot keep packed texts apart, too: what they compute stays what it is."""
    monkeypatch.setattr(next_token, "check_separates_texts", lambda model: None)


def make(name, **more):
    """A model with new weights, large enough for attention that is not almost even."""
    family, settings, *_ = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **more})
    torch.manual_seed(1)
    model = pretrained.new_model(transformers.AutoModelForCausalLM, config, PLAIN).train()
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.data *= 3
    return model


def rows(packed):
    """Three sequences; packed ones hold texts of 10, 1 and 12 tokens, and padding."""
    tokens = torch.randint(3, 128, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        places = [*range(10), 0, *range(12), *[0] * 9]
        batch["position_ids"] = torch.tensor([places, [*range(LENGTH)], [*range(16), *range(16)]])
        batch["labels"][0, 23:] = batch["labels"][:, :5] = -100  # padding, and a prompt
        batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def prepared(model, packed, chunk=16):
    """A copy, with chunks of this size where it allows them."""
    model = copy.deepcopy(model)
    next_token.prepare(model, "auto", packed)
    if model.decisions["loss_chunk"]:
        assert model.decisions["loss_chunk"] == next_token.CHUNK
        model.decisions["loss_chunk"] = chunk
    return model


def plain_loss(model, batch):
    """The loss that transformers computes, summed."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache="position_ids" not in batch).logits
    return ForCausalLMLoss(logits, batch["labels"], logits.shape[-1], num_items_in_batch=1)


def gradients(model, loss):
    """The gradients of a loss, at the scale that a step of many tokens has."""
    model.zero_grad()
    (loss / 64).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(expected, found, rel=1e-6):
    """The same gradients, up to a part of the largest."""
    assert expected.keys() == found.keys()
    largest = max(values.abs().max() for values in expected.values())
    for name, values in expected.items():
        assert (values - found[name]).abs().max() <= rel * largest, name


def check_plain(model, fast, batch):
    """The loss and the gradients of a prepared model are those of a plain call."""
    expected, found = plain_loss(model, batch), next_token.loss_sum(fast, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    known = gradients(model, expected)
    check_same(known, gradients(fast, found))
    return known


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_a_plain_call(name, packed):
    *_, expected_attention, is_split = MODELS[name]
    model, batch = make(name), rows(packed)
    state = torch.random.get_rng_state()
    fast = prepared(model, packed)
    assert torch.equal(state, torch.random.get_rng_state()) and fast.training
    assert fast.config._attn_implementation == expected_attention
    assert fast.decisions == {"loss_chunk": 16 if is_split else 0, "packed": packed}
    check_plain(model, fast, batch)
    with torch.no_grad():
        expected = plain_loss(model, batch).item()
        assert next_token.loss_sum(fast, batch).item() == pytest.approx(expected, rel=1e-6)
    if name in ("llama", "gpt2"):  # a smaller batch than a chunk: the very same operations
        whole = prepared(model, packed, chunk=10_000)
        check_plain(model, whole, batch)
        assert packed or next_token.loss_sum(whole, batch).item() == expected


# ---- Padding -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer for padding alone; pad_token_id is 0."""
    return word_tokenizer([f"t{i}" for i in range(128)], pad_token="t0")


def pad(tokenizer, collator, texts):
    """The batch that a collator of transformers makes of texts, lists of token ids."""
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]
    if collator == "ForLanguageModeling":
        return {**transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)}
    if collator == "ForSeq2Seq":
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
        return {**transformers.DataCollatorForSeq2Seq(tokenizer)(rows)}
    batch = {**transformers.DataCollatorWithPadding(tokenizer)(rows)}
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("name, side, collator", cases("padded"))
def test_padding_on_either_side_changes_no_loss(name, side, collator, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "padding_side", side)
    texts = [[*range(3, 30)], [*range(40, 49)], [7, 5]]
    fast = prepared(make(name), False)
    whole = pad(tokenizer, collator, texts)
    assert (whole["attention_mask"][1, 0] == 0) == (side == "left")
    assert next_token.counted(whole).sum() == sum(len(ids) - 1 for ids in texts)
    tensors = [torch.tensor([ids]) for ids in texts]
    losses = [next_token.loss_sum(fast, {"input_ids": t, "labels": t}) for t in tensors]
    together = next_token.loss_sum(fast, whole)
    assert together.item() == pytest.approx(sum(losses).item(), rel=1e-6)
    states = next_token.states_of(fast, whole, fast.decisions)
    each = torch.cat(next_token.losses_of(states, "none")).view(3, -1).sum(1)
    assert torch.allclose(each, torch.stack(losses), rtol=1e-6)
    check_same(gradients(fast, sum(losses)), gradients(fast, together), rel=3e-6)


def test_a_mask_hides_what_it_is_zero_for_between_tokens_too():
    model, batch = make("llama"), rows(False)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, 3:7] = mask[1, :5] = 0
    batch["labels"] = batch["labels"].masked_fill(mask.roll(1, 1) == 0, -100)
    batch["attention_mask"] = mask
    expected = plain_loss(model, batch | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)})
    found = next_token.loss_sum(prepared(model, False), batch).item()
    assert found == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "kwargs are not handed down"])
def test_positions_separate_texts_of_a_model_that_expects_none(name):
    """As they do in transformers: DataCollatorWithFlattening packs so."""
    model, batch = make(name), rows(True)
    check_plain(model, prepared(model, False), batch)


def test_a_model_that_cannot_keep_packed_texts_apart_is_refused():
    with pytest.raises(ValueError, match="the type bloom cannot keep packed texts apart"):
        check_separates_texts(make("no positions"))
    check_separates_texts(make("llama"))


def test_labels_that_are_given_shifted_are_used():
    fast, batch = prepared(make("llama"), False), rows(False)
    shifted = next_token.shift(batch["labels"])
    assert shifted.shape == (3, LENGTH) and torch.equal(shifted[:, :-1], batch["labels"][:, 1:])
    assert (shifted[:, -1] == -100).all()
    expected = next_token.loss_sum(fast, batch).item()
    assert next_token.counted(batch).sum() == 3 * (LENGTH - 1)
    batch |= {"labels": torch.zeros_like(shifted), "shift_labels": shifted}
    assert next_token.loss_sum(fast, batch).item() == expected
    assert next_token.counted(batch).sum() == 3 * (LENGTH - 1)


# ---- Models with more to them --------------------------------------------------------------------


def test_flash_attention_gets_packed_texts_as_one_sequence():
    model, batch = make("llama"), rows(True)
    model.config._attn_implementation_internal = "flash_attention_2"
    inputs = next_token.model_inputs(model, batch, {"packed": True})
    assert inputs.keys() == {"input_ids", "position_ids", "use_cache"}
    for name in ("input_ids", "position_ids"):
        assert torch.equal(inputs[name], batch[name].view(1, -1))
    batch["attention_mask"] = torch.ones(3, LENGTH)  # beside which transformers finds no texts
    assert next_token.model_inputs(model, batch, {"packed": True}).keys() == inputs.keys()
    assert next_token.model_inputs(model, rows(False))["input_ids"].shape == (3, LENGTH)


def test_a_number_of_tokens_is_refused_where_auto_is_the_plain_call(capsys):
    next_token.prepare(make("capped"), "auto")
    assert "Gemma2ForCausalLM: loss_chunk is 0, since the logits of" in capsys.readouterr().out
    with pytest.raises(ValueError, match="task.loss_chunk: the logits of Gemma2ForCausalLM"):
        next_token.prepare(make("capped"), 16)


def test_a_chunk_bounds_the_memory_of_the_loss():
    hidden = torch.randn(256, 16, requires_grad=True)
    head = torch.nn.Linear(16, 512, bias=False)
    labels = torch.randint(0, 512, (256,))
    sizes = []
    hook = head.register_forward_hook(lambda module, given, logits: sizes.append(logits.numel()))
    loss = sum(next_token.losses_of(next_token.States(head, hidden, labels, 32), "sum"))
    loss.backward()
    assert sizes == [32 * 512] * 16  # eight chunks, and each again in the backward pass
    hook.remove()
    expected = F.cross_entropy(head(hidden), labels, reduction="sum")
    assert loss.item() == pytest.approx(expected.item())


EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 32, "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip


def mixture(family="Qwen3Moe", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **EXPERTS, **more})
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("family, padded", [("Qwen3Moe", False), ("Mixtral", True)])
def test_loss_and_gradients_of_a_micro_batch_are_those_of_transformers(family, padded, capsys):
    model, batch = mixture(family), rows(False)
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
    pure = next_token.loss_sum(prepared(mixture(family, router_aux_loss_coef=0.0), False), batch)
    assert not capsys.readouterr().out and found - pure > 0.4 * items
    nothing = next_token.loss_sum(fast, {**batch, "labels": torch.full((3, LENGTH), -100)})
    assert nothing == 0 and all((g == 0).all() for g in gradients(fast, nothing).values())
    assert next_token.loss_sum(fast.eval(), batch).item() == pytest.approx(pure.item())


def test_each_pair_has_the_router_s_loss_of_both_answers():
    task, model, batch = load_task("preference"), prepared(mixture(), False), rows(False)
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
    mixture(vocab_size=300).save_pretrained(folder)
    more = ["--task.model_name_or_path", folder, "--exact", "true"]
    for name, processes in (("two", 2), ("one", 1), ("half", 1)):
        if name == "half":
            copy_until(tmp_path / "two", 3, tmp_path / name)
        printed = project.train(processes, *flags, tmp_path / name, *more)
        assert "includes its router's loss" in printed
    check_same_runs(*(tmp_path / name for name in ("two", "one", "half")))
