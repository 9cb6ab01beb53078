"""What comes from outside: predict's input, images of any kind, and names in what is shown."""

import json
import os
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import transformers
import yaml
from PIL import EpsImagePlugin, Image

from conftest import BakedProject
from refusals import check_ended
from samestep.data import images
from samestep.report import model_card
from small_models import new_model, word_tokenizer

HOSTILE = ["a\nb\x1b[31m|`x`", "\u202eright to left", "x" * 10_000, "$\\frac_{\udcff\u4e2d"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two very small models, of the classes of texts and of images."""
    folder = tmp_path_factory.mktemp("models")
    labels = {"id2label": dict(enumerate(HOSTILE))}
    sizes = {"vocab_size": 2, "max_position_embeddings": 64}
    bert = new_model("Bert", "ForSequenceClassification", **sizes, **labels)
    bert.save_pretrained(folder / "texts")
    words = word_tokenizer(["?", "one"], whole=True, pad_token="?")
    words.save_pretrained(folder / "texts")
    vit = new_model("ViT", "ForImageClassification", image_size=8, patch_size=4, **labels)
    vit.save_pretrained(folder / "images")
    size = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    transformers.BitImageProcessor(**size).save_pretrained(folder / "images")
    return folder


def predict(folder, *flags, **options):
    command = ["python", "-m", "samestep", "predict", *flags]
    return BakedProject(folder).run(*command, check=False, **options)


def test_weights_of_another_model_are_refused(made, tmp_path):
    model = shutil.copytree(made / "texts", tmp_path / "model")
    shutil.copy(made / "images" / "model.safetensors", model)
    result = predict(tmp_path, "--model", "model", "one")
    check_ended(result, "its files lack ", "samestep predict: ")
    assert "of its weights: bert." in result.stderr


def test_code_that_came_with_a_model_is_not_run(made, tmp_path):
    """And nobody is asked whether to."""
    model = shutil.copytree(made / "texts", tmp_path / "model")
    (model / "evil.py").write_text("open('ran', 'w')\nclass Config: pass\n")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (model / "config.json").write_text(json.dumps(config))
    result = predict(tmp_path, "--model", "model", "one", stdin=b"y\n")
    assert result.returncode == 0 and not (tmp_path / "ran").exists()


def test_each_line_is_answered_in_its_place(made):
    flags = ["--model", "texts"]
    given = "\ufeffone\n \r\ntwo\u2028lines\nthree\x1b[2J\u202e".encode()
    result = predict(made, *flags, "--top", "99", stdin=given)
    shown = result.stdout.splitlines()
    found = [json.loads(line) for line in shown]
    texts = ["one", " ", "two\u2028lines", "three\x1b[2J\u202e"]
    assert [answer["input"] for answer in found] == texts
    assert all(line.isprintable() for line in shown)  # whatever its classes are called
    assert sorted(each["label"] for each in found[0]["classes"]) == sorted(HOSTILE)
    refusal = predict(made, *flags, stdin=b"caf\xe9\n")
    check_ended(refusal, "can't decode byte 0xe9", "samestep predict: ")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def test_eps_never_reaches_ghostscript(tmp_path, monkeypatch):
    """A gs on PATH would leave a file behind when it is started."""
    program, started = tmp_path / "gs", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch '{started}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # else what was found earlier
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(OSError, match="its format is none of JPEG, PNG"):
        images.open_image(tmp_path / "a.png")
    assert not started.exists()
    with pytest.raises(OSError), Image.open(tmp_path / "a.png") as image:
        image.load()
    assert started.exists()  # so that it would have been seen above


def test_predictions_see_images_as_training_does(made, tmp_path):
    """Turned as the camera says: an image and its upright copy get equal answers. The first that
    is none ends it."""
    image = Image.fromarray(np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3))
    image.save(tmp_path / "a.png")
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    (tmp_path / "text.png").write_text("no image")
    names = ["turned.png", "upright.png", "a.png", "text.png", "a.png"]
    result = predict(tmp_path, "--model", made / "images", "--top", "4", *names)
    found = [json.loads(line)["classes"] for line in result.stdout.splitlines()]
    assert found[0] == found[1] != found[2] and len(found) == 3
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "no answer to text.png: UnidentifiedImageError: its format is none" in result.stderr


def test_a_model_card_with_hostile_names(tmp_path):
    path = "a`b```\n## Evaluation\n<script>|\u202e\udcff"
    task = {"data": path, "model_name_or_path": f"x\n---\n{path}", "name": "\u4e2d"}
    config = {"project": f"# {path}\n---\n", "global_batch_size": 8, "task": task}
    scores = {"a|b": 1.0, "line\nbreak": 2.0, "eval_loss": 3.0, "z" * 10_000: 4.0}
    facts = {"step": 1, "steps": 1, "scores": scores, "config": config, "devices": "1 x cpu, fp32"}
    facts |= {"data": {"samples": 9, "fingerprint": "f"}, "hardware": {"torch": "2.13.0"}}
    about = {"architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    model_card.write_card(tmp_path, Path("runs") / 'x"\n```\n\u202e' / "model", facts)

    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    lines = card.split("\n")
    assert all(line.isprintable() for line in lines)
    headings = [line for line in lines if line.startswith("#")]
    assert headings[0].startswith("# # a\\`b")
    assert headings[1:] == ["## Evaluation", "## Settings", "## Hardware and versions"]
    about = yaml.safe_load(card.split("\n---\n")[0])
    values = [each["value"] for each in about["model-index"][0]["results"][0]["metrics"]]
    assert values == [*scores.values()]
    assert "\n| a\\|b | 1 |\n| line break | 2 |\n| eval_loss | 3 |\n" in card
    settings = card.partition("## Settings\n\n")[2].partition("\n##")[0]
    assert yaml.safe_load(textwrap.dedent(settings)) == config
