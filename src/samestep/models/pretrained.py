"""Models of transformers: pretrained weights and their tokenizers, or new weights."""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samestep.base.console import one_line, print_on_main
from samestep.base.fields import MODEL, NOTHING, check_ignored_fields, is_local_name, local_path
from samestep.models import weight_files

# transformers takes 4 s to import: it waits for the function that needs it.
_NUMBERS = (int, float)
# Endings of the files of a tokenizer or an image processor.
_SHAPING = (".json", ".jinja", ".txt", ".model", ".spm", ".bpe", ".tiktoken", ".py")


@dataclass
class ModelConfig:
    """Fields of every task with a model of transformers."""

    # Pretrained model
    model_name_or_path: str = ""
    """Weights to start from: a model on the Hub, or a folder such as runs/default/model; empty: new
    weights, and a model of the sizes below."""
    revision: str = "main"
    """Model on the Hub: its branch, tag or commit."""
    trust_remote_code: bool = field(default=False, metadata=NOTHING)
    """Model on the Hub: run the code in its repository."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = field(
        default="sdpa", metadata=MODEL
    )
    """How attention is computed, by transformers' names; flash_attention_2 needs its package, or
    kernels, which loads it from the Hub, a GPU, and bf16 or fp16."""

    def key_values(self) -> dict[str, str]:
        """Replace a branch by its commit in the key of prepared data."""
        is_hub = self.model_name_or_path and not folder_of(self)
        return {"revision": _snapshot_of(self).name if is_hub else ""}

    def named_files(self) -> dict[str, list[str]]:
        """Name the files of a local model folder that shape its tokenizer or image processor."""
        if not (folder := folder_of(self)):
            return {"model_name_or_path": []}
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
        names = sorted(str(file.relative_to(folder)) for file in files if file.suffix in _SHAPING)
        return {"model_name_or_path": [f"{self.model_name_or_path}/{name}" for name in names]}


def folder_of(cfg: ModelConfig) -> Path | None:
    """The local folder of the model to start from; None for one on the Hub, or a new model.

    Raises ValueError for a path without a folder, which would be looked up on the Hub.
    """
    name, folder = cfg.model_name_or_path, local_path(cfg.model_name_or_path)
    if not name or os.path.isdir(folder):  # False for what is no path
        return folder if name else None
    if is_local_name(name):
        raise ValueError(
            f"task.model_name_or_path: there is no folder {one_line(name, 100)}; give an existing "
            "one, or OWNER/NAME of the Hub, and no folder called OWNER here"
        )
    return None


def check_unread(cfg: ModelConfig) -> None:
    """Raises ValueError for fields of a model on the Hub that are set without one. Sizes of a new
    model are in recipes that start from others."""
    hub = bool(cfg.model_name_or_path and not folder_of(cfg))
    without = "without a model on the Hub to start from"
    check_ignored_fields(cfg, [("revision trust_remote_code", hub, without)])


def width_rule(cfg: Any, pair: int = 2) -> tuple[str, bool, str]:
    """For check_fields: heads share the width of a new model, and rotary embeddings turn pairs."""
    unit = pair * cfg.num_heads
    fits = bool(cfg.model_name_or_path) or cfg.hidden_size % unit == 0
    return "hidden_size", fits, f"a multiple of {pair} x num_heads, {unit}"


def _snapshot_of(cfg: ModelConfig, **options: Any) -> Path:
    """The folder snapshots/COMMIT with the files of a model on the Hub that are on this machine."""
    from huggingface_hub import hf_hub_download

    with _loading(cfg):
        file = hf_hub_download(
            cfg.model_name_or_path, "config.json", revision=cfg.revision, **options
        )
    return Path(file).parent


@contextlib.contextmanager
def _loading(cfg: ModelConfig) -> Iterator[None]:
    """Makes a ValueError of any error: each of many libraries has its own."""
    try:
        yield
    except Exception as error:
        name, reason = one_line(cfg.model_name_or_path, 100), one_line(error).rstrip(".")
        hint = "" if folder_of(cfg) else "; a folder that holds the model can be given in its place"
        raise ValueError(f"task.model_name_or_path: cannot load {name}: {reason}{hint}") from None


def load(auto: Any, cfg: ModelConfig, **options: Any) -> Any:
    """`auto.from_pretrained` of cfg.model_name_or_path; raises ValueError where it fails."""
    name, folder = cfg.model_name_or_path, folder_of(cfg)
    adapter = folder and (folder / "adapter_config.json").exists()
    if adapter and not (folder / "config.json").exists():
        problem = "a LoRA adapter alone; merge it into its model, or train with --task.merge_lora"
        raise ValueError(f"task.model_name_or_path: {name} holds {problem}")
    options |= {"trust_remote_code": cfg.trust_remote_code}
    options |= {} if folder else {"revision": cfg.revision}
    with _loading(cfg), quiet():
        return auto.from_pretrained(str(folder or name), **options)


def save_processor(kind: Any, cfg: ModelConfig, folder: Path, **options: Any) -> None:
    """Saves the processor of the pretrained model, or a new one, with these options in `folder`:
    the numbers by which the model was trained stay."""
    own = load(kind, cfg, **options) if cfg.model_name_or_path else kind(**options)
    own.save_pretrained(folder)


def config_of(cfg: ModelConfig) -> Any:
    """The config of the model to start from; None: a new model."""
    if not cfg.model_name_or_path:
        return None
    from transformers import AutoConfig

    return load(AutoConfig, cfg)


def _attention_option(cfg: ModelConfig) -> dict[str, str]:
    """The option for transformers: unset, it is sdpa, or eager where a model lacks sdpa."""
    name = cfg.attn_implementation
    return {} if name == "sdpa" else {"attn_implementation": name}


def load_model(auto: Any, cfg: ModelConfig, head: tuple[str, ...] = (), **options: Any) -> Any:
    """A pretrained model in fp32, since the accelerate YAML decides the precision.

    Weights whose names contain one of `head` may be new. Raises ValueError if others are missing,
    or if the files have tensors beside those that are loaded, see weight_files.py. Under
    `torch.device("meta")` nothing but the config is read.
    """
    import torch
    from transformers import AutoConfig

    if torch.get_default_device().type == "meta":
        options.pop("ignore_mismatched_sizes", None)
        return new_model(auto, load(AutoConfig, cfg, **options), cfg)
    own = []  # names of classes
    if len(options.get("id2label", ())) > 1:
        own = [*load(AutoConfig, cfg).id2label.values()]
    options |= {"dtype": torch.float32, **_attention_option(cfg)}
    model, info = load(auto, cfg, output_loading_info=True, **options)
    folder = folder_of(cfg) or _snapshot_of(cfg, local_files_only=True)
    weight_files.check_zeros(folder)
    given = one_line(cfg.model_name_or_path, 100)
    new = {*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])}
    new = {name for name in new if not name.endswith("num_batches_tracked")}  # of frozen ones
    prefix = model.base_model_prefix if head else ""
    inside = f"{prefix}." if prefix else ""  # other weights belong to the head
    missing = [name for name in new if not any(part in name for part in head)]
    missing = sorted(name for name in missing if name.startswith(inside))
    if missing:
        names = one_line(", ".join(missing[:3]), 200)
        raise ValueError(
            f"task.model_name_or_path: {given} is for something else: it has no weights for {names}"
        )
    taken = weight_files.check_taken(model, info["unexpected_keys"], folder)
    remarks = [taken, weight_files.forget_ignored(model, folder)]
    if new:
        remarks.append(f"new weights for {one_line(', '.join(sorted(new)))}")
    if own:
        remarks.append(_meet_labels(model, own, [*options["id2label"].values()], head, new))
    for line in filter(None, remarks):
        print_on_main(f"{given}: {line}")
    return model


def _meet_labels(
    model: Any, own: list[str], wanted: list[str], head: tuple[str, ...], new: set[str]
) -> str:
    """Gives each class that is wanted its weights of the head by its name, or all of the head new
    weights where the names are others. `new`: names of weights that are new already.

    A head without names (LABEL_0, ...) stays. Returns a line about it, or "".
    """
    found = []
    for name, layer in model.named_modules():
        sizes = (getattr(layer, "out_features", 0), getattr(layer, "out_channels", 0))
        if len(wanted) in sizes and any(part in name for part in head):
            found.append((name, layer))
    name, layer = found[-1] if found else ("", None)
    if own == wanted or f"{name}.weight" in new or new and not found:
        return ""
    lists = f"its classes are {', '.join(own)}, those of the data {', '.join(wanted)}"
    lists = one_line(lists, 300)
    if all(re.fullmatch(r"label_\d+", str(name), re.IGNORECASE) for name in own):
        return f"its head keeps its weights and their order: {lists}"
    if not found:
        return f"warning: its head keeps its weights, and {lists}"
    if len({*own}) < len(own) or {*own} != {*wanted}:
        layer.reset_parameters()
        return f"new weights for {name}: {lists}"
    for weights in layer.parameters():
        weights.data = weights.data[[own.index(each) for each in wanted]].clone()
    return f"{name} has another order, by the names: {lists}"


def new_model(auto: Any, config: Any, cfg: ModelConfig) -> Any:
    """A model with new weights; raises ValueError if it lacks cfg.attn_implementation."""
    try:
        return auto.from_config(config, **_attention_option(cfg))
    except (ImportError, ValueError) as error:
        raise ValueError(f"task.attn_implementation: {one_line(error)}") from None


def answer_ends(tokenizer: Any) -> list[int]:
    """The special tokens with which the chat template ends an answer: the first after a text, and
    the last after a call of a tool. Empty: there is none, or no template."""
    mark, found = "90000009", []
    calls = [{"type": "function", "function": {"name": "a", "arguments": {"a": mark}}}]
    for message, place in ({"content": mark}, 0), ({"content": "", "tool_calls": calls}, -1):
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", **message}]
        with contextlib.suppress(Exception):  # a template may raise anything, or show no calls
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            end = text[text.rindex(mark) + len(mark) :]
            ids = tokenizer(end, add_special_tokens=False).input_ids
            found.append([i for i in ids if i in tokenizer.added_tokens_decoder][place])
    return found


def without_dropout(cfg: ModelConfig) -> dict[str, float]:
    """Settings by which the model is the same function in training: each number of its config with
    `drop` in its name is 0."""
    config = config_of(cfg)
    known = config.to_dict().items() if config else ()
    # No switch: `token_dropout`, which rescales, is True.
    return {name: 0.0 for name, value in known if "drop" in name and type(value) in _NUMBERS}


def build_generator(
    auto: Any, cfg: ModelConfig, config: Any, tokenizer: Any, **settings: Any
) -> Any:
    """The pretrained model, or a new one of this config, which generates with this tokenizer.
    `settings` replace those of the pretrained model's config, which `save_model` puts back."""
    if cfg.model_name_or_path:
        model = load_model(auto, cfg, **settings)
        known = config_of(cfg)
        model.own_settings = {name: getattr(known, name) for name in settings}
    else:
        model = new_model(auto, config, cfg)
    if model.config.is_encoder_decoder and getattr(model.config, "output_router_logits", False):
        print_on_main(f"{type(model).__name__}: the loss does not include that of its routers")
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:  # it sets temperature or top_p without do_sample, and could not be saved
        generation.do_sample = True
    # Not in the config: Llama never trains the embedding of its pad token, which ends texts too.
    generation.pad_token_id = tokenizer.pad_token_id
    own = generation.eos_token_id
    own = [own] if isinstance(own, int) else own or []
    stops = dict.fromkeys([*own, tokenizer.eos_token_id, *answer_ends(tokenizer)])
    if len(stops) > len(own):
        generation.eos_token_id = [*stops]
    return model


def build_model(auto: Any, cfg: ModelConfig, config: Any, head: tuple[str, ...] = ()) -> Any:
    """The pretrained model, or a new one of this config; `head`: see `load_model`."""
    return load_model(auto, cfg, head) if cfg.model_name_or_path else new_model(auto, config, cfg)


def small_bert(folder: Path) -> Any:
    """The config of a small BERT for the tokenizer in `folder`, without dropout."""
    from transformers import AutoTokenizer, BertConfig

    return BertConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def build_classifier(
    auto: Any,
    cfg: ModelConfig,
    config: Any,
    names: list[str],
    head: tuple[str, ...],
    **settings: Any,
) -> Any:
    """The pretrained model, with a new head for other classes than its own, or a new one of this
    config. `names`: of the classes; `settings` of the config; `head`: see `load_model`."""
    settings |= {"num_labels": len(names), "id2label": dict(enumerate(names))}
    settings["label2id"] = {name: i for i, name in enumerate(names)}
    if cfg.model_name_or_path:
        return load_model(auto, cfg, head, ignore_mismatched_sizes=True, **settings)
    config.update(settings)
    return new_model(auto, config, cfg)


def export(model: Any, output: Path, data: Any) -> None:
    """Save a model of transformers, with the tokenizer or processor that prepare_data has saved."""
    from samestep.prepared.prepared import copy_identity

    copy_identity(data.folder, output)
    model.save_pretrained(output)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences progress bars and warnings of transformers, which every process would print."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            logging.set_verbosity(level)
