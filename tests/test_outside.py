"""What comes from outside: predict's input, images of any kind, and names in what is shown."""

import json
import os
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import EpsImagePlugin, Image

import programs
from programs import refused
from samestep.images import images
from samestep.programs import predict
from samestep.report import model_card

HOSTILE = ["a\nb\x1b[31m|`x`", "\u202eright to left", "x" * 10_000, "$\\frac_{\udcff\u4e2d"]


def picture(path, kind="PNG"):
    Image.fromarray(np.arange(12 * 9 * 3, dtype=np.uint8).reshape(12, 9, 3)).save(path, kind)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with very small models: lm, which goes on texts, classes and images."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers.pipelines import pipeline  # noqa: F401  imported once, for all forks

    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 16}
    names = {"id2label": dict(enumerate(HOSTILE)), "label2id": {n: i for i, n in enumerate("abcd")}}
    texts = {"vocab_size": 257, "max_position_embeddings": 64, "pad_token_id": 0, **small}
    patches = {"image_size": 8, "patch_size": 4, **small}
    made = {
        "lm": t.LlamaForCausalLM(t.LlamaConfig(**texts)),
        "classes": t.BertForSequenceClassification(t.BertConfig(**texts, **names)),
        "images": t.ViTForImageClassification(t.ViTConfig(**patches, **names)),
    }
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words = {"tokenizer_object": words, "eos_token": "<end>", "pad_token": "<end>"}
    words = t.PreTrainedTokenizerFast(**words, model_max_length=64)
    for name, model in made.items():
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    size = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    t.BitImageProcessor(**size).save_pretrained(folder / "images")
    (folder / "texts.txt").write_text("one\ntwo\n")
    return folder


def test_the_first_error_ends_it_and_is_one_line(models):
    picture(models / "a.png")
    result = programs.run(predict, models, "--model", "images", "a.png", "texts.txt", "a.png")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("samestep predict: no answer to texts.txt: Unidentified")
    assert json.loads(result.stdout).keys() == {"input", "classes"}


def test_a_score_that_is_nan_is_no_answer(models, monkeypatch):
    result = programs.run(predict, models, "--model", "lm", "--tokens", "0", "one")
    assert refused(result, "no answer to one: ValueError: ")
    monkeypatch.setattr(predict, "ask", lambda given, *_: {"value": float(given)})
    result = programs.run(predict, models, "--model", "classes", "1", "nan", "2")
    assert result.returncode == 2 and "no answer to nan: ValueError: " in result.stderr
    assert json.loads(result.stdout) == {"input": "1", "value": 1}


# ---- Its models ----------------------------------------------------------------------------------


FILES = {
    "torn weights": ("model.safetensors", b"torn", "cannot load"),
    "others' weights": ("model.safetensors", "classes", "its files lack 12 of its weights: lm_"),
    "code of its own": ("config.json", {"auto_map": {"AutoConfig": "evil.Config"}}, ""),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_model_is_one_line(models, tmp_path, name):
    """Code that came with a model is not run, and nobody is asked whether to."""
    file, content, said = FILES[name]
    model = shutil.copytree(models / "lm", tmp_path / "model")
    (model / "evil.py").write_text("open('ran', 'w')\nclass Config: pass\n")
    if isinstance(content, dict):
        content = json.dumps(json.loads((model / file).read_text()) | content).encode()
    (model / file).unlink(missing_ok=True)
    if content == "classes":
        shutil.copy(models / content / file, model / file)
    else:
        (model / file).write_bytes(content)
    result = programs.run(predict, tmp_path, "--model", "model", "x", stdin=b"y\n")
    assert refused(result, said) if said else result.returncode == 0
    assert not (tmp_path / "ran").exists()


# ---- What predict prints -------------------------------------------------------------------------


def test_each_line_is_answered_in_its_place(models):
    flags = ["--model", "classes"]
    given = "\ufeffone\n \r\ntwo\u2028lines\nthree\x1b[2J\u202e".encode()
    result = programs.run(predict, models, *flags, "--top", "99", stdin=given)
    shown = result.stdout.splitlines()
    found = [json.loads(line) for line in shown]
    texts = ["one", " ", "two\u2028lines", "three\x1b[2J\u202e"]
    assert [answer["input"] for answer in found] == texts
    assert all(line.isprintable() for line in shown)  # whatever its classes are called
    assert sorted(each["label"] for each in found[0]["classes"]) == sorted(HOSTILE)
    refusal = programs.run(predict, models, *flags, stdin=b"caf\xe9\n")
    assert refused(refusal, "can't decode byte 0xe9")


# ---- Images --------------------------------------------------------------------------------------


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def test_eps_never_reaches_ghostscript(models, tmp_path, monkeypatch):
    """A gs on PATH would leave a file behind when it is started."""
    program, started = tmp_path / "bin" / "gs", tmp_path / "started"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{started}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # else what was found earlier
    for name in ("a.png", "a.eps"):
        (tmp_path / name).write_bytes(EPS)
        with pytest.raises(OSError, match="none of JPEG, PNG"):
            images.middle(tmp_path / name, 8)
        result = programs.run(predict, tmp_path, "--model", models / "images", name)
        assert result.returncode == 2 and result.stdout == ""
        assert f"{name}: UnidentifiedImageError: its format is none of JPEG, PN" in result.stderr
    assert not started.exists()
    with pytest.raises(OSError), Image.open(tmp_path / "a.png") as image:
        image.load()
    assert started.exists()  # so that it would have been seen above


def test_predictions_see_images_as_training_does(models, tmp_path):
    """Turned as the camera says, and in RGB: an image and its upright copy get equal answers."""
    with Image.open(picture(tmp_path / "a.png")) as image:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees clockwise
        image.save(tmp_path / "turned.png", exif=exif)
        image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
        image.convert("P").save(tmp_path / "palette.gif")
    names = ["turned.png", "upright.png", "a.png", "palette.gif"]
    flags = ["--model", models / "images", "--top", "4"]
    result = programs.run(predict, tmp_path, *flags, *names)
    found = [json.loads(line)["classes"] for line in result.stdout.splitlines()]
    assert found[0] == found[1] != found[2] and len(found) == 4


# ---- Pictures and the model card -----------------------------------------------------------------


def test_a_model_card_with_hostile_names(tmp_path):
    path = "a`b```\n## Evaluation\n<script>|\u202e\udcff"
    config = {
        "project": f"# {path}\n---\n",
        "global_batch_size": 8,
        "task": {"data": path, "model_name_or_path": f"x\n---\n{path}", "name": "\u4e2d"},
    }
    scores = {"a|b": 1.0, "line\nbreak": 2.0, "eval_loss": 3.0, "z" * 10_000: 4.0}
    data = {"samples": 9, "fingerprint": "f"}
    facts = {"step": 1, "steps": 1, "scores": scores, "config": config, "data": data}
    facts |= {"hardware": {"torch": "2.13.0"}, "devices": "1 x cpu, fp32"}
    about = {"architectures": ["ViTForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    place = Path("runs") / 'x"\n```\n\u202e' / "model"
    model_card.write_card(tmp_path, place, facts)

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
