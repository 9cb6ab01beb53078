"""The head of a classifier to start from: it is kept for the same classes."""

import pytest
import torch
import transformers
from datasets import ClassLabel, Dataset, Features

from conftest import load_task
from refusals import cases
from samestep.models import pretrained
from small_models import new_model


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
    assert torch.equal(new.classifier.weight, old.classifier.weight) == kept
    assert torch.equal(new.classifier.weight, again.classifier.weight)  # on every process
    assert [*new.config.id2label.values()] == names
    said = "new weights for classifier: its classes are cat, Dog, emu, those of the data "
    assert (said + ", ".join(names) in capsys.readouterr().out) != kept


def test_a_model_that_is_compared_with_its_reference_has_no_dropout(tmp_path):
    """OPT reads its dropout as a number; a switch with such a name stays."""
    config = transformers.OPTConfig(dropout=0.5, layerdrop=0, token_dropout=True)
    config.save_pretrained(tmp_path)
    settings = pretrained.without_dropout(pretrained.ModelConfig(model_name_or_path=str(tmp_path)))
    assert settings == {"dropout": 0, "attention_dropout": 0, "layerdrop": 0}
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
