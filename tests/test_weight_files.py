"""What a pretrained model's files hold and the model does not take; when its head is kept."""

import json

import pytest
import torch
import transformers as t
from datasets import ClassLabel, Dataset, Features
from safetensors.torch import load_file, save_file

from conftest import load_task
from refusals import cases
from samestep.models import pretrained, weight_files
from small_models import new_model

SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64}
MOE = {**SMALL, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
MOE |= {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "head_dim": 8}
HEAD = load_task("text_classification").HEAD
LM, CLASSES = t.AutoModelForCausalLM, t.AutoModelForSequenceClassification


def llama(**more):
    return new_model("Llama", **{**SMALL, **more})


def gpt2():
    sizes = {"vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return new_model("GPT2", "LMHeadModel", num_hidden_layers=2, **sizes)


def save(folder, model, more=(), fields=None, rename=str, pickled=False):
    """Files of a model with more tensors, under other names and with other fields in its config."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {rename(name): values for name, values in weights.items()}
    weights |= {name: torch.ones(2, 2) for name in more}
    (folder / "model.safetensors").unlink()
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (fields or {})))
    return pretrained.ModelConfig(model_name_or_path=str(folder))


ONE = {"num_hidden_layers": 1}
BESIDE = [  # a model, how it is loaded, what its files have besides, and what is said
    (llama(attention_bias=True), LM, {"fields": {"attention_bias": False}},
     "8 tensors: self_attn.k_proj.bias"),
    (llama(), LM, {"fields": ONE, "pickled": True}, "9 tensors: model.layers.1.input_layernorm"),
    (new_model("Llama", "Model", **SMALL), CLASSES, {"fields": ONE}, "9 tensors: layers.1."),
    (llama(), LM, {"more": ["model.layers.0.self_attn.q_norm.weight"]}, "1 tensor: q_norm"),
    (llama(), LM, {"more": ["model.embed_norm.weight"]}, "1 tensor: model.embed_norm.weight"),
]  # fmt: skip


@pytest.mark.parametrize("model, auto, options, said", BESIDE)
def test_tensors_beside_those_that_are_loaded_end_the_run(tmp_path, model, auto, options, said):
    cfg = save(tmp_path / "m", model, **options)
    number, name = said.split(": ")
    with pytest.raises(ValueError, match=name) as error:
        pretrained.load_model(auto, cfg, HEAD if auto is CLASSES else ())
    assert f"{number} that its config.json has no place for" in str(error.value)


def old_name(name):
    """The name of a weight in files of before 2019."""
    new = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return new.replace("LayerNorm.bias", "LayerNorm.beta")


BERT = new_model("Bert", "ForPreTraining", **SMALL)
OLD = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
VISION = ["vision_tower.layers.0.weight", "model.multi_modal_projector.linear_1.weight"]
MERGED = new_model("Qwen2Moe", **MOE)
BRANCHES = [  # and what is said; nothing where no weight is left out
    (BERT, CLASSES, {}, "7 tensors of its files are not in this model: cls"),
    (new_model("Bert", "Model", **SMALL), t.AutoModelForMaskedLM, {},
     "2 tensors of its files are not in this model: pooler"),
    (BERT, CLASSES, {"rename": old_name}, "7 tensors of its files are not in this model: cls"),
    (llama(), LM, {"more": VISION}, "model.multi_modal_projector, vision_tower"),
    (gpt2(), LM, {"more": ["transformer.h.0.attn.bias"]}, ""),  # masks
    (llama(), LM, {"more": OLD}, ""),
    (MERGED, LM, {}, ""),
    (llama(tie_word_embeddings=True), LM, {}, ""),
]  # fmt: skip


@pytest.mark.parametrize("model, auto, options, said", BRANCHES)
def test_branches_that_are_not_loaded_are_one_line(tmp_path, capsys, model, auto, options, said):
    cfg = save(tmp_path / "m", model, **options)
    if model is MERGED:
        names = load_file(tmp_path / "m" / "model.safetensors")
        assert "model.layers.0.mlp.experts.1.up_proj.weight" in names
    loaded = pretrained.load_model(auto, cfg, HEAD if auto is CLASSES else ("cls",))
    lines = [each for each in capsys.readouterr().out.split("\n") if "in this model" in each]
    assert len(lines) == bool(said) and said in "".join(lines)
    before, after = model.base_model.state_dict(), loaded.base_model.state_dict()
    assert all(torch.equal(before[key], values) for key, values in after.items() if key in before)


def test_layers_that_transformers_leaves_out_are_said_and_not_announced(tmp_path, capsys):
    sizes = {**SMALL, "layer_types": ["full_attention"] * 2, "hidden_size": 32, "head_dim": 16}
    config = t.Qwen3_5TextConfig(num_attention_heads=2, mtp_num_hidden_layers=1, **sizes)
    model = t.Qwen3_5ForCausalLM(config)
    more = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.norm.bias"]
    cfg = save(tmp_path / "m", model, more=more)
    loaded = pretrained.load_model(LM, cfg)
    assert "3 tensors of its files are not in this model: mtp\n" in capsys.readouterr().out
    assert loaded.config.mtp_num_hidden_layers == 0 and loaded.config.num_hidden_layers == 2


def test_shards_are_read_and_other_files_are_not(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="5KB")
    save_file({"extra": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    names = [name for file in weight_files.list_files(tmp_path) for name in load_file(file)]
    assert sorted(names) == sorted(llama().state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ONE))
    with pytest.raises(ValueError, match="9 tensors that its config.json has no place for"):
        pretrained.load_model(LM, pretrained.ModelConfig(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("first, last", [(0.5, 1), (0.4, 0.6)])
def test_a_file_with_zeros_in_place_of_weights_is_named(tmp_path, first, last):
    cfg = save(tmp_path / "m", llama())
    pretrained.load_model(LM, cfg)
    file = tmp_path / "m" / "model.safetensors"
    file.with_name("model.fp16.safetensors").write_bytes(bytes(10**6))
    file.with_name("pytorch_model.bin").write_bytes(bytes(10**6))
    pretrained.load_model(LM, cfg)  # it loads neither of them
    content = bytearray(file.read_bytes())
    start, stop = int(first * len(content)), int(last * len(content))
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors has zeros for weights from byte \d+"):
        pretrained.load_model(LM, cfg)


def start(folder, names):
    """The model of the task for these classes, which starts from the one in the folder."""
    task = load_task("image_classification")
    cfg = task.TaskConfig(data="x", model_name_or_path=str(folder))
    torch.manual_seed(1)
    features = Features(label=ClassLabel(names=names))
    return task.build_model(cfg, {"train": Dataset.from_dict({"label": [0]}, features)})


@pytest.mark.parametrize("own, names, kept", cases("heads"))
def test_a_head_is_kept_for_the_same_classes_or_without_names(tmp_path, capsys, own, names, kept):
    sizes = {"image_size": 8, "patch_size": 4, "id2label": dict(enumerate(own))}
    old = new_model("ViT", "ForImageClassification", **sizes)
    old.save_pretrained(tmp_path)
    new, again = start(tmp_path, names), start(tmp_path, names)
    order = [own.index(name) if name in own else i for i, name in enumerate(names)]
    assert torch.equal(new.classifier.weight, old.classifier.weight[order]) == kept
    assert torch.equal(new.classifier.bias, old.classifier.bias[order]) or not kept
    assert torch.equal(new.classifier.weight, again.classifier.weight)  # on every process
    assert [*new.config.id2label.values()] == names
    said = f"its classes are {', '.join(own)}, those of the data {', '.join(names)}"
    printed = capsys.readouterr().out
    assert (said in printed) == (own != names)
    assert (f"new weights for classifier: {said}" in printed) != kept


def test_a_model_that_is_compared_with_its_reference_has_no_dropout(tmp_path):
    """OPT reads its dropout as a number; a switch with such a name stays."""
    config = t.OPTConfig(dropout=0.5, layerdrop=0, token_dropout=True)
    config.save_pretrained(tmp_path)
    settings = pretrained.without_dropout(pretrained.ModelConfig(model_name_or_path=str(tmp_path)))
    assert settings == {"dropout": 0, "attention_dropout": 0, "layerdrop": 0}
    assert pretrained.without_dropout(pretrained.ModelConfig()) == {}


def test_targets_are_shifted_for_models_that_do_it_in_their_forward():
    config = t.M2M100Config(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = t.M2M100ForConditionalGeneration(config).eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "attention_mask": torch.ones(1, 4).long()}
    labels = torch.tensor([[8, 9, 2, -100]])
    logits = load_task("seq2seq").target_logits(model, {**batch, "labels": labels})
    assert torch.allclose(logits, model(**batch, labels=labels).logits, atol=1e-6)
