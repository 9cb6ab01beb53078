"""The check of an export: it passes what a run exports, and finds each way to lose something."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conftest import ROOT, bake, status, write_table
from samestep.contract import contract
from samestep.end import ending, export_check
from samestep.report import model_card
from small_models import new_model
from test_tasks import BY_NAME, TEMPLATES, chat

CHAT = {"rows": "chat", "context_length": 128}
CHATS = [chat(f"{i}?", f"{i}.") for i in range(60)]


def export(kit, folder, table=None, **fields):
    """The folder of a model of a kit, with larger weights than new ones have, and its answers."""
    table = table or (CHATS if fields.get("rows") == "chat" else kit.rows)
    cfg, prepared, data = kit.prepare(folder, table, **{"validation_fraction": 0.2, **fields})
    torch.manual_seed(1)
    model = kit.task.build_model(cfg, prepared).eval()
    with torch.no_grad():
        for values in filter(lambda each: each.requires_grad, model.parameters()):
            values.mul_(4 if values.ndim > 1 else 1)
        config = SimpleNamespace(task=cfg, timeout=600, tf32=False, check_export=True)
    bound = contract.bind(kit.task, cfg, prepared)
    run = SimpleNamespace(task=bound, cfg=config, validation=data[1])
    asked = ending.ask_trained(run, model)
    output = folder / "model"
    output.mkdir()
    kit.task.export(model, output, cfg, prepared)
    return run, output, asked


def check(output, asked):
    """What the check finds; it changes nothing of what was asked."""
    return export_check.compare_outputs(str(output), asked, asked[0]["dtype"])


def change_weights(change):
    """A change of the largest weight of an exported model, in its file."""

    def make(folder):
        tensors = load_file(folder / "model.safetensors")
        name = max(tensors, key=lambda each: tensors[each].numel())
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return make


@pytest.mark.parametrize("kit", TEMPLATES, ids=lambda kit: kit.name)
def test_the_export_of_each_task_answers_as_its_model_and_a_changed_one_not(kit, tmp_path):
    _, output, asked = export(kit, tmp_path)
    found = check(output, asked)
    assert found["dtype"] == "float32" and found["difference"] < 1e-5
    assert len(asked) >= 3
    answers = [each["logits"] for each in asked]
    assert any(each != answers[0] for each in answers)  # else they would prove little
    change_weights(lambda values: values + 0.05 * torch.randn_like(values))(output)
    with pytest.raises(ValueError, match="its logits differ by"):
        check(output, asked)


def test_a_pair_of_texts_and_its_labels(tmp_path):
    kit = BY_NAME["text_classification"]
    rows = [{**row, "pair": row["text"][::-1]} for row in kit.rows]
    _, output, asked = export(kit, tmp_path, rows, text_pair_column="pair")
    assert check(output, asked)["difference"] < 1e-5
    file, names = output / "config.json", {"odd": "even", "even": "odd"}
    file.write_text(re.sub("(odd|even)", lambda name: names[name[0]], file.read_text()))
    with pytest.raises(ValueError, match="its labels of .*odd', 'even'], not .'even', 'odd'"):
        check(output, asked)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """An exported model of chats, and what the trained one has answered."""
    return export(BY_NAME["causal_lm"], tmp_path_factory.mktemp("chats"), **CHAT)[1:]


def edit_template(folder):
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("': '", "':  '"))


def save_in_bf16(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


CHANGES = {
    "another template": (edit_template, "its tokens of .* are .*, not"),
    "no template": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template is not set"),
    "another dtype": (save_in_bf16, "its dtype of .* are bfloat16, not float32"),
    "rounded": (change_weights(lambda v: v.bfloat16().float()), "its logits differ by"),
}


def test_what_an_export_of_chats_has_lost_is_found(chats, tmp_path):
    exported, asked = chats
    assert check(exported, asked)["difference"] < 1e-5
    assert [type(each["given"]) for each in asked] == [list, list]
    for name, (change, said) in CHANGES.items():
        output = shutil.copytree(exported, tmp_path / name)
        change(output)
        with pytest.raises(ValueError, match=said):
            check(output, asked)


IM_END = (ROOT / "tests" / "chat_templates" / "im_end.jinja").read_text().strip()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model whose chat template ends answers with another token than its end of text."""
    folder = tmp_path_factory.mktemp("base")
    export(BY_NAME["causal_lm"], folder, **CHAT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = IM_END
    tokenizer.save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "model")
    return folder / "model"


NO = [{"role": "assistant", "content": "no"}]
PAIRS = [
    {"prompt": each["messages"][:1], "chosen": each["messages"][1:], "rejected": NO}
    for each in CHATS
]
FORMS = [
    ("causal_lm", CHATS, {"context_length": 128}),
    ("causal_lm", CHATS, {"context_length": 128, "lora_rank": 4, "merge_lora": True}),
    ("preference", PAIRS, {"lora_rank": 4}),
]


@pytest.mark.parametrize("name, rows, fields", FORMS)
def test_an_export_stops_where_its_template_ends_an_answer(base, tmp_path, name, rows, fields):
    fields = {**fields, "model_name_or_path": str(base)}
    _, output, asked = export(BY_NAME[name], tmp_path, rows, **fields)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    settings = json.loads((output / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [eos, end]
    assert check(output, asked)["stop"] == "<|im_end|>"
    # Used as the card says, by a model that prefers the end of an answer to all other tokens.
    used: dict = {}
    code = model_card.describe_use("text-generation", output, str(output))
    exec(code.split("```python\n")[1].split("```")[0], used)
    model = used["answer"].model
    model.get_output_embeddings().register_forward_hook(
        lambda _, inputs, logits: logits.index_fill(-1, torch.tensor([end]), 1e4)
    )
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=9).tolist() == [[5, 6, end]]
    settings["eos_token_id"] = eos
    (output / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"not stop at <.im_end.>, .* is {eos}, not {end}$"):
        check(output, asked)


def test_recipes_but_for_the_smoke_test_check_their_export():
    recipes = [*(ROOT / "templates").glob("*/*.yaml")]
    checked = {path for path in recipes if "\ncheck_export: true\n" in path.read_text("utf-8")}
    assert checked == {path for path in recipes if path.stem != "smoke"} and len(checked) >= 6


class Segmenter(torch.nn.Module):
    """A task's model around one of transformers, whose normalization may be exchanged."""

    def __init__(self, exchange):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
        config = transformers.SegformerConfig(**sizes, decoder_hidden_size=8)
        self.net = transformers.SegformerForSemanticSegmentation(config)
        if exchange:
            self.net.decode_head.batch_norm = torch.nn.GroupNorm(2, 8)


def run_of(output, **functions):
    task = SimpleNamespace(**functions)
    config = SimpleNamespace(task=SimpleNamespace(), tf32=False)
    return SimpleNamespace(output=output, task=task, cfg=config, tested=(None, None))


@pytest.mark.parametrize("exchange", [False, True])
def test_without_test_inputs_all_tensors_are_compared(tmp_path, capsys, exchange):
    """A model whose BatchNorm was exchanged is another one when transformers loads it."""
    model, folder = Segmenter(exchange).eval(), tmp_path / "model"
    model.net.save_pretrained(folder)
    (folder / "README.md").write_text("A card.\n")
    result = ending.check_export(run_of(tmp_path), model)
    printed = capsys.readouterr().out
    loaded = transformers.SegformerForSemanticSegmentation.from_pretrained(folder).eval()
    image = torch.randn(1, 3, 64, 64)
    same = torch.equal(loaded(image).logits, model.net(image).logits)
    assert same is not exchange
    assert (result == "passed") is same
    if exchange:
        assert "warning: the exported model could not be confirmed: it has " in printed
        assert "decode_head.batch_norm.running_mean, which the trained model has not" in printed
        assert "could not be confirmed" in (folder / "README.md").read_text()
    else:
        assert re.search("^checked: .* as SegformerForSemanticSegmentation, with the", printed)
        change_weights(lambda values: values + 1e-6)(folder)
        with pytest.raises(ValueError, match="has other values than that of the trained model"):
            export_check.compare_tensors(str(folder), model)


def test_inputs_of_a_task_without_a_tokenizer_are_given_again(tmp_path):
    """Tokens of a vocabulary that is the task's own: there is nothing that reads a text."""
    model = new_model("GPT2", "LMHeadModel", vocab_size=11, n_positions=16).eval()
    model.save_pretrained(tmp_path)
    run = run_of(tmp_path, test_inputs=lambda rows: [(None, {"input_ids": [row]}) for row in rows])
    run.validation = [[1, 2, 3], [4, 5, 6, 7]]
    asked = ending.ask_trained(run, model)
    assert check(tmp_path, asked)["difference"] < 1e-6 and len(asked) == 2
    change_weights(lambda values: values + 0.05 * torch.randn_like(values))(tmp_path)
    with pytest.raises(ValueError, match="its logits differ by"):
        check(tmp_path, asked)


@pytest.mark.slow
def test_a_run_says_what_was_checked(chats, tmp_path):
    """Of adapters of chats."""
    project, output = bake(tmp_path, pictures=False, tracker="none"), tmp_path / "run"
    flags = ["--max_steps", 2, "--global_batch_size", 2, "--micro_batch_size", 1]
    flags += ["--warmup_steps", 1, "--check_export", "true", "--output_dir", output]
    flags += ["--task.data", write_table(tmp_path, CHATS), "--task.context_length", 64]
    flags += ["--task.model_name_or_path", chats[0], "--task.lora_rank", 4]
    printed = project.train(2, *flags)
    (line,) = re.findall("^checked: (.*)$", printed, re.M)
    assert "gives the same logits for " in line and line.endswith("; it stops after <|endoftext|>")
    assert status(output)["export_check"] == "passed"
    card = (output / "model" / "README.md").read_text()
    assert f"## Check\n\n{model_card.escape_markdown(line, 400)}\n" in card


def test_an_export_that_transformers_does_not_know_is_not_checked_and_this_is_said(quick, tmp_path):
    printed = quick("--check_export", "true", "--output_dir", tmp_path / "run")
    assert printed.count("\nexport not checked: task.py has no function test_inputs, and ") == 1
    assert status(tmp_path / "run")["export_check"].startswith("export not checked: ")
    assert status(tmp_path / "run")["state"] == "finished"
    quick("--output_dir", tmp_path / "without")
    assert "export_check" not in status(tmp_path / "without")
