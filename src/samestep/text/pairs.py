"""Pairs of a source and a target text: read, tokenized, shown as rows; targets are generated."""

import difflib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from samestep.base.console import one_line
from samestep.base.fields import check_fields
from samestep.data import demo_data
from samestep.data.files import TABLES
from samestep.data.inputs import RowFormat, find_inputs
from samestep.data.rows import load_rows
from samestep.data.sources import check_data_config, require_text
from samestep.data.views import Rows
from samestep.models import pretrained
from samestep.text import tokenizing

# Stored texts have the names of the tokenizer's arguments: some tell targets apart by it.
TEXTS = ("text", "text_target")


def check_config(cfg: Any) -> None:
    """Raises ValueError for fields of the data and the model that do not fit each other."""
    check_data_config(cfg, ["dates"])
    two_columns = cfg.source_column != cfg.target_column
    rules = [("target_column", two_columns, "another column than task.source_column")]
    check_fields(cfg, [*rules, pretrained.width_rule(cfg, 1)])
    pretrained.check_unread(cfg)


def normalize(row: dict, cfg: Any) -> dict[str, str]:
    """A row as it is stored; raises ValueError for one without two texts."""
    text = require_text("source", row[cfg.source_column])
    return {"text": text, "text_target": require_text("target", row[cfg.target_column])}


def read_rows(cfg: Any) -> datasets.DatasetDict:
    """The rows of cfg.data as splits train and validation: `text` and `text_target`. Pairs of one
    source text are all in one split.

    Raises ValueError unless a pretrained model is an encoder-decoder that sees all the text.
    """
    tokenizing.check_lengths(cfg, "max_source_length", "max_target_length")
    config = pretrained.config_of(cfg)
    if config and not getattr(config, "is_encoder_decoder", False):
        text = f"{cfg.model_name_or_path} is not an encoder-decoder; give another"
        raise ValueError(f"task.model_name_or_path: {text}")
    inputs = find_inputs(cfg, {"dates": demo_data.date_rows}, TABLES)
    columns = {cfg.source_column: True, cfg.target_column: True}
    features = {name: datasets.Value("string") for name in TEXTS}
    form = RowFormat(columns, partial(normalize, cfg=cfg), features, group=lambda row: row["text"])
    return load_rows(inputs, cfg, form)


def set_languages(tokenizer: Any, cfg: Any, folder: Path) -> Any:
    """Let a tokenizer write the languages of cfg into texts, and save it in `folder`.

    Raises ValueError for a language that is missing, or unknown to the tokenizer.
    """
    from transformers import AutoTokenizer

    known = tokenizing.languages_of(tokenizer)
    for name, attribute in (("source_lang", "src_lang"), ("target_lang", "tgt_lang")):
        given = getattr(cfg, name)
        if not known:
            text = "its tokenizer writes no language codes into texts; leave it out"
            check_fields(cfg, [(name, not given, f"empty: {text}")])
            continue
        if given not in known:
            near = difflib.get_close_matches(given, known, 5, 0.3) if given else []
            shown = near or known[:: max(1, len(known) // 5)][:6]
            text = f"one of the {len(known)} languages of the tokenizer, as {', '.join(shown)}"
            check_fields(cfg, [(name, False, text)])
        tokenizer.init_kwargs[attribute] = given  # which is saved
        setattr(tokenizer, attribute, given)
    tokenizer.model_max_length = cfg.max_source_length  # samestep predict cuts sources there
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)  # some keep in Rust what they had before


def view(dataset: datasets.Dataset, cfg: Any) -> Rows:
    """A map-style view of tokenized pairs: dicts of input_ids and labels, each (T,)."""
    names = ["input_ids", "labels"]
    return Rows(dataset, names, names, cfg)


# ---- Generation and export -----------------------------------------------------------------------


def test_inputs(rows: list[dict], cfg: Any, data: Any) -> list[tuple[str, dict]]:
    """For the check of the export: the sources of validation rows, each with its tokens."""
    tokenizer = tokenizing.load_tokenizer(data.folder)
    chosen = data["validation"][: len(rows)]["text"]
    texts = [cfg.source_prefix + text for text in chosen]
    return [(each, {"input_ids": [tokenizer(each, truncation=True).input_ids]}) for each in texts]


def set_generation(model: Any, cfg: Any, tokenizer: Any) -> None:
    """Writes the search of cfg, the language of targets and the prefix of sources into the configs
    of the exported model: each target begins with the language, as labels have it."""
    if tokenizing.languages_of(tokenizer):
        language = tokenizing.language_id(tokenizer, tokenizer.tgt_lang)
        labels = tokenizer(text_target="a").input_ids
        if labels[0] == language:  # NLLB, mBART-50, M2M100
            model.generation_config.forced_bos_token_id = language
        elif labels[-1] == language:  # mBART, whose targets begin with what the labels end with
            model.generation_config.forced_bos_token_id = None
            model.generation_config.decoder_start_token_id = language
            model.config.decoder_start_token_id = language
        else:
            raise ValueError(
                f"task.target_lang: the tokenizer does not write {tokenizer.tgt_lang} at either "
                "end of a target; give another model"
            )
    model.config.source_prefix = cfg.source_prefix  # for samestep predict
    settings = model.generation_config
    settings.update(num_beams=cfg.num_beams, max_new_tokens=cfg.max_target_length, max_length=None)
    # Those of a model for summaries would change targets that it has learned.
    settings.update(min_length=None, min_new_tokens=None, no_repeat_ngram_size=None)
    if cfg.num_beams == 1:  # transformers does not save settings of a search that is not used
        settings.update(early_stopping=None, length_penalty=None)


def write_report(model: Any, batches: Iterable[dict], rows: Any, cfg: Any, data: Any) -> dict:
    """BLEU and chrF of the targets that a model generates for these rows, and five of them.

    `batches`: input_ids and attention_mask, int64 (B, T). The generation_config says how to search.
    """
    from sacrebleu.metrics import BLEU, CHRF

    tokenizer, generated = tokenizing.load_tokenizer(data.folder), []
    for batch in batches:
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        tokens = model.generate(**inputs, do_sample=False)  # sampling would draw random numbers
        generated += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    sources, targets = rows["text"], rows["text_target"]
    # "force" silences a warning about targets that end in " .", as tokenized ones do.
    bleu, chrf = (m.corpus_score(generated, [targets]).score for m in (BLEU(force=True), CHRF()))
    search = "greedy search" if cfg.num_beams == 1 else f"{cfg.num_beams} beams"
    shown = {"generation": f"BLEU {bleu:.1f}, chrF {chrf:.1f} ({len(targets):,} rows, {search})"}
    first = zip(sources[:5], targets[:5], generated[:5], strict=True)
    for number, (source, target, answer) in enumerate(first, 1):
        expected = "as the target" if answer == target else f"target: {target}"
        line = f"{one_line(source)} -> {one_line(answer)} ({one_line(expected)})"
        shown[f"sample {number}"] = line
    return shown
