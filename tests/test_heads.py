"""The head of a classifier to start from: its classes are found by their names."""

import json

import pytest
import torch
import transformers

from conftest import load_task
from samestep.data import labels
from samestep.models import pretrained

OWN = ["cat", "Dog", "emu"]


def save(folder, names):
    """A small image classifier with these classes, whose rows of the head differ."""
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        id2label=dict(enumerate(names)),
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    model.save_pretrained(folder)
    return model


def start(folder, tmp_path, names):
    """The model of the task for these classes, which starts from the one in the folder."""
    prepared = tmp_path / "prepared"
    prepared.mkdir(exist_ok=True)
    (prepared / "labels.json").write_text(json.dumps(names))
    task = load_task("image_classification")
    cfg = task.TaskConfig(data="x", model_name_or_path=str(folder))
    torch.manual_seed(1)
    return task.build_model(cfg, prepared)


@pytest.mark.parametrize("names", [OWN, ["emu", "cat", "dog"]])
def test_classes_are_found_by_their_names(tmp_path, capsys, names):
    old = save(tmp_path / "old", OWN)
    new = start(tmp_path / "old", tmp_path, names)
    order = [[name.casefold() for name in OWN].index(name.casefold()) for name in names]
    assert torch.equal(new.classifier.weight, old.classifier.weight[order])
    assert new.classifier.bias.tolist() == [order_of + 1.0 for order_of in order]
    assert [*new.config.id2label.values()] == names
    assert ("are taken by their names" in capsys.readouterr().out) == (names != OWN)


def test_a_head_for_other_classes_is_new(tmp_path, capsys):
    old = save(tmp_path / "old", OWN)
    new = start(tmp_path / "old", tmp_path, ["cat", "dog", "owl"])
    assert new.classifier.bias.tolist() == [0, 0, 0]
    assert not torch.equal(new.classifier.weight, old.classifier.weight)
    assert "new weights for classifier: its classes have other names" in capsys.readouterr().out
    again = start(tmp_path / "old", tmp_path, ["cat", "dog", "owl"])
    assert torch.equal(new.classifier.weight, again.classifier.weight)  # on every process


def test_a_head_without_names_is_kept(tmp_path, capsys):
    old = save(tmp_path / "old", ["LABEL_0", "LABEL_1", "LABEL_2"])
    new = start(tmp_path / "old", tmp_path, ["a", "b", "c"])
    assert torch.equal(new.classifier.weight, old.classifier.weight)
    assert capsys.readouterr().out == ""


def test_classes_that_differ_in_case_alone_are_different():
    model = torch.nn.ModuleDict({"classifier": torch.nn.Linear(2, 2)})
    bias = model["classifier"].bias.tolist()
    pretrained.match_classes(model, ["A", "a"], ["a", "A"], ("classifier",))
    assert model["classifier"].bias.tolist() == bias[::-1]


def test_numbers_as_classes_are_told():
    counts = labels.Counter({str(n): 2 for n in range(30)})
    names = [str(n) for n in range(30)]
    _, warning = labels.describe_labels(counts, 60, names, labels.SINGLE)
    assert "--task.problem_type regression" in warning
    few = labels.Counter({str(n): 2 for n in range(10)})
    assert not labels.describe_labels(few, 20, names[:10], labels.SINGLE)[1]


def test_decimals_are_numbers():
    assert labels.parse_label(labels.Decimal("3.50"), labels.NUMBER) == 3.5
    assert labels.parse_label(labels.Decimal("3.0"), labels.SINGLE) == "3"
    with pytest.raises(ValueError, match="not a finite number"):
        labels.parse_label(labels.Decimal("NaN"), labels.NUMBER)
