"""What a pretrained model's files hold and the model does not take: branches, or parts of it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from conftest import load_task
from samestep.models import pretrained, weight_files

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SMALL |= {"intermediate_size": 32, "num_key_value_heads": 2}
MOE = {**SMALL, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
MOE |= {"shared_expert_intermediate_size": 8, "decoder_sparse_step": 1, "head_dim": 8}
HEAD = load_task("text_classification").HEAD
LM, CLASSES = AutoModelForCausalLM, AutoModelForSequenceClassification


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**SMALL, **more))


def gpt2(kind):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return kind(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))


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
BESIDE = {
    "a bias of a weight": (llama(attention_bias=True), LM, {"fields": {"attention_bias": False}},
                           8, "self_attn.k_proj.bias"),
    "a layer": (llama(), LM, {"fields": ONE}, 9, "model.layers.1.input_layernorm.weight"),
    "a layer, pickled": (llama(), LM, {"fields": ONE, "pickled": True}, 9, "model.layers.1.input"),
    "a layer of the base model alone": (LlamaModel(LlamaConfig(**SMALL)), CLASSES,
                                        {"fields": ONE}, 9, "model.layers.1.input_layernorm"),
    "a norm in a layer": (llama(), LM, {"more": ["model.layers.0.self_attn.q_norm.weight"]}, 1,
                          "self_attn.q_norm.weight"),
    "a norm of the embeddings": (llama(), LM, {"more": ["model.embed_norm.weight"]}, 1,
                                 "model.embed_norm.weight"),
    "a scale": (llama(), LM, {"more": ["model.layers.0.mlp.up_proj.weight_scale"]}, 1, "_scale"),
    "a shared expert": (llama(), LM, {"more": ["model.layers.0.mlp.expert.up_proj.weight"]}, 1,
                        "mlp.expert"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_tensors_beside_those_that_are_loaded_end_the_run(tmp_path, name):
    model, auto, options, number, said = BESIDE[name]
    cfg = save(tmp_path / "m", model, **options)
    with pytest.raises(ValueError) as error:
        pretrained.load_model(auto, cfg, HEAD if auto is CLASSES else ())
    plural = f"{number} tensor{'s' * (number > 1)} that its config.json has no place for"
    assert plural in str(error.value) and said in str(error.value)


def old_name(name):
    """The name of a weight in files of before 2019."""
    new = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    return new.replace("LayerNorm.bias", "LayerNorm.beta")


BERT = BertForPreTraining(BertConfig(**SMALL))
OLD = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
VISION = ["vision_tower.layers.0.weight", "model.multi_modal_projector.linear_1.weight"]
BRANCHES = {
    "heads": (BERT, CLASSES, {}, "7 tensors of its files are not in this model: cls"),
    "a pooler": (BERT, AutoModelForMaskedLM, {},
                 "4 tensors of its files are not in this model: bert.pooler, cls.seq_relationship"),
    "a pooler of the base model alone": (BertModel(BertConfig(**SMALL)), AutoModelForMaskedLM, {},
                                         "2 tensors of its files are not in this model: pooler"),
    "names of old": (BERT, CLASSES, {"rename": old_name},
                     "7 tensors of its files are not in this model: cls"),
    "a vision tower": (llama(), LM, {"more": VISION}, "model.multi_modal_projector, vision_tower"),
    "a head for values": (llama(), LM, {"more": ["v_head.summary.weight"]},
                          "1 tensor of its files is not in this model: v_head"),
    "masks of GPT-2": (gpt2(GPT2LMHeadModel), LM, {"more": ["transformer.h.0.attn.bias"]}, ""),
    "masks of GPT-2 alone": (gpt2(GPT2Model), LM, {"more": ["h.0.attn.bias"]}, ""),
    "positions of old Llamas": (llama(), LM, {"more": OLD}, ""),
    "experts that are merged": (Qwen2MoeForCausalLM(Qwen2MoeConfig(**MOE)), LM, {}, ""),
    "tied heads": (llama(tie_word_embeddings=True), LM, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_whole_branches_that_are_not_loaded_are_one_line(tmp_path, capsys, name):
    model, auto, options, said = BRANCHES[name]
    cfg = save(tmp_path / "m", model, **options)
    if name == "experts that are merged":
        names = load_file(tmp_path / "m" / "model.safetensors")
        assert "model.layers.0.mlp.experts.1.up_proj.weight" in names
    loaded = pretrained.load_model(auto, cfg, HEAD if auto is CLASSES else ("cls",))
    lines = [each for each in capsys.readouterr().out.split("\n") if "in this model" in each]
    assert len(lines) == bool(said) and said in "".join(lines)
    before, after = model.base_model.state_dict(), loaded.base_model.state_dict()
    assert all(torch.equal(before[key], values) for key, values in after.items() if key in before)


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
    content = bytearray(file.read_bytes())
    start, stop = int(first * len(content)), int(last * len(content))
    content[start:stop] = bytes(stop - start)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors has zeros for weights from byte \d+"):
        pretrained.load_model(LM, cfg)
