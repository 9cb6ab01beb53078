"""The head of a classifier to start from: its classes are found by their names."""

import pytest
import torch
import transformers

from conftest import load_task, with_classes

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
