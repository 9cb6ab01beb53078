"""The head of a classifier to start from: its classes are found by their names."""

import pytest
import torch
import transformers

from conftest import load_task, with_classes
from samestep.models.preferences import disable_dropout
from samestep.models.pretrained import match_classes

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
    return task.build_model(cfg, with_classes(names))


@pytest.mark.parametrize(
    "own, names, order",
    [(OWN, OWN, [0, 1, 2]), (OWN, ["emu", "cat", "dog"], [2, 0, 1]),
     (["A", "a", "b"], ["a", "A", "b"], [1, 0, 2]),
     (["LABEL_0", "LABEL_1", "LABEL_2"], OWN, [0, 1, 2])],
)  # fmt: skip
def test_classes_are_found_by_their_names(tmp_path, capsys, own, names, order):
    """A head without names is kept; classes that differ in case alone are different."""
    old = save(tmp_path / "old", own)
    new = start(tmp_path / "old", names)
    assert torch.equal(new.classifier.weight, old.classifier.weight[order])
    assert new.classifier.bias.tolist() == [place + 1.0 for place in order]
    assert [*new.config.id2label.values()] == names
    assert ("are taken by their names" in capsys.readouterr().out) == (order != [0, 1, 2])


def test_a_head_for_other_classes_is_new(tmp_path, capsys):
    old = save(tmp_path / "old", OWN)
    new = start(tmp_path / "old", ["cat", "dog", "owl"])
    assert new.classifier.bias.tolist() == [0, 0, 0]
    assert not torch.equal(new.classifier.weight, old.classifier.weight)
    assert "new weights for classifier: its classes have other names" in capsys.readouterr().out
    again = start(tmp_path / "old", ["cat", "dog", "owl"])
    assert torch.equal(new.classifier.weight, again.classifier.weight)  # on every process


def test_both_heads_of_a_model_with_two_are_in_order():
    config = transformers.DeiTConfig(
        hidden_size=16, intermediate_size=16, image_size=8, patch_size=4, num_hidden_layers=1,
        num_attention_heads=2, num_labels=3,
    )  # fmt: skip
    model = transformers.DeiTForImageClassificationWithTeacher(config)
    heads = model.cls_classifier, model.distillation_classifier
    before = [each.weight.clone() for each in heads]
    said = match_classes(model, OWN, ["emu", "cat", "dog"], ("classifier",))
    assert said == "its classes are taken by their names"
    for head, old in zip(heads, before, strict=True):
        assert torch.equal(head.weight, old[[2, 0, 1]])


def test_a_model_that_is_compared_with_its_reference_has_no_dropout(capsys):
    """OPT reads its dropout as a number."""
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=16, word_embed_proj_dim=16, num_hidden_layers=1,
        num_attention_heads=2, dropout=0.5,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).train()
    ids = torch.arange(3, 9)[None]
    assert not torch.equal(*(model(input_ids=ids).logits for _ in range(2)))
    disable_dropout(model)
    assert model.training and torch.equal(*(model(input_ids=ids).logits for _ in range(2)))
    assert "warning" not in capsys.readouterr().out


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
