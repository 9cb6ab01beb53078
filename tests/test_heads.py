"""The head of a classifier to start from: it is kept for the same classes."""

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features

from conftest import load_task
from samestep.models import pretrained

OWN = ["cat", "Dog", "emu"]


def save(folder, names):
    """A small image classifier with these classes, whose rows of the head differ."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, id2label=dict(enumerate(names)))
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    model.save_pretrained(folder)
    return model


def start(folder, names):
    """The model of the task for these classes, which starts from the one in the folder."""
    task = load_task("image_classification")
    cfg = task.TaskConfig(data="x", model_name_or_path=str(folder))
    torch.manual_seed(1)
    features = Features(label=ClassLabel(names=names))
    return task.build_model(cfg, {"train": Dataset.from_dict({"label": [0]}, features)})


@pytest.mark.parametrize("own", [OWN, ["LABEL_0", "LABEL_1", "LABEL_2"]])
def test_a_head_for_the_same_classes_or_without_names_is_kept(tmp_path, capsys, own):
    old = save(tmp_path / "old", own)
    new = start(tmp_path / "old", OWN)
    assert torch.equal(new.classifier.weight, old.classifier.weight)
    assert new.classifier.bias.tolist() == [1, 2, 3]
    assert [*new.config.id2label.values()] == OWN
    assert "new weights" not in capsys.readouterr().out


@pytest.mark.parametrize("names", [["cat", "dog", "owl"], ["emu", "cat", "Dog"]])
def test_a_head_for_other_classes_or_another_order_is_new(tmp_path, capsys, names):
    old = save(tmp_path / "old", OWN)
    new = start(tmp_path / "old", names)
    assert not any(
        torch.equal(row, other) for row in new.classifier.weight for other in old.classifier.weight
    )
    said = "new weights for classifier: its classes are cat, Dog, emu, those of the data "
    assert said + ", ".join(names) in capsys.readouterr().out
    again = start(tmp_path / "old", names)
    assert torch.equal(new.classifier.weight, again.classifier.weight)  # on every process


def test_a_model_that_is_compared_with_its_reference_has_no_dropout(tmp_path):
    """OPT reads its dropout as a number; a switch with such a name stays."""
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=16, word_embed_proj_dim=16, num_hidden_layers=1,
        num_attention_heads=2, dropout=0.5, layerdrop=0, token_dropout=True,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    cfg = pretrained.ModelConfig(model_name_or_path=str(tmp_path))
    settings = pretrained.without_dropout(cfg)
    assert settings == {"dropout": 0, "attention_dropout": 0, "layerdrop": 0}
    ids, auto = torch.arange(3, 9)[None], transformers.AutoModelForCausalLM
    for given, same in (({}, False), (settings, True)):
        model = pretrained.load_model(auto, cfg, **given).train()
        assert torch.equal(*(model(input_ids=ids).logits for _ in range(2))) == same
    assert model.config.token_dropout is True
    assert pretrained.without_dropout(pretrained.ModelConfig()) == {}


def test_targets_are_shifted_for_models_that_do_it_in_their_forward():
    config = transformers.M2M100Config(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 2]]), "attention_mask": torch.ones(1, 4).long()}
    labels = torch.tensor([[8, 9, 2, -100]])
    logits = load_task("seq2seq").target_logits(model, {**batch, "labels": labels})
    assert torch.allclose(logits, model(**batch, labels=labels).logits, atol=1e-6)
