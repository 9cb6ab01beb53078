"""What train.py --check shows of the data."""

from types import SimpleNamespace

import torch

from samestep.prepared import preview
from small_models import word_tokenizer


def test_a_check_shows_a_row_and_a_batch_but_not_where_a_launcher_asks(quick, tmp_path):
    flags = ["--output_dir", tmp_path / "run", "--check"]
    *shown, last = quick(*flags).splitlines()
    assert shown[0].startswith("row ") and "  x: float32 (8, 8)" in shown
    assert "a batch of 8 rows:" in shown
    assert shown[-1] == "  17 items in the loss; a run prints the loss per item"
    assert last.startswith("checked: ")
    assert quick(*flags, env={"LAUNCHING": "1"}).splitlines() == [last]


def test_tokens_are_decoded_and_all_fits_a_screen(tmp_path):
    word_tokenizer(["<unk>", "red", "apples"]).save_pretrained(tmp_path)
    row = {"input_ids": [1, 2, 1], "labels": [-100, 2, -100], "uneven": [[1], [1, 2]]}
    row |= {"text": "long\x1b " * 100, "half": torch.zeros(2, dtype=torch.bfloat16)}
    row |= {f"more_{i}": i for i in range(9)}
    samples = [(7, row), (9, row)]
    task = SimpleNamespace(
        UNIT="target_tokens",
        collate=lambda rows: {
            f"n{i}": torch.zeros(len(rows), 5, dtype=torch.int32) for i in range(9)
        },
        count=lambda batch: 1234,
    )
    shown = preview.describe_samples(samples, task, SimpleNamespace(folder=tmp_path))
    assert shown[:3] == [
        "row 9 to train on:",
        "  input_ids: int64 (3,) 'red apples red'",
        "  labels: int64 (3,) 'apples'",
    ]
    assert "  and 8 more" in shown and "  n5: int32 (2, 5)" in shown and "\x1b" not in str(shown)
    assert shown[-1].startswith("  1,234 target tokens in the loss; ")
    assert len(shown) < 24 and max(map(len, shown)) <= 122
