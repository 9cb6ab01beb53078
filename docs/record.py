"""Records docs/killed.svg: a run is killed, and resumes by the same command.

    make demo
    .venv/bin/python docs/record.py demo/my_training

Lines and their times are those of the commands; pauses longer than a second are shortened to one.
The data is prepared before. All lines are shown first, so that a reader without animation sees
them.
"""

import contextlib
import html
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

TRAIN = 'make train RECIPE=smoke ARGS="--output_dir runs/{}"'
SHOWN = TRAIN + ' | grep --line-buffered "continuing\\|eval_loss"'
SUMS = "sha256sum runs/{killed,whole}/model/model.safetensors | cut -c 1-20,65-"
COLORS = {"$": "#7dd3fc", "m": "#fca5a5"}  # by the first character of a line
WIDTH, ROW, HOLD = 104, 18, 8.0


def kill(child: subprocess.Popen, metrics: Path, step: int) -> None:
    """kill -9 of train.py, once it has logged this step."""
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        time.sleep(0.01)
    for process in psutil.Process(child.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "python" in process.name() and "train.py" in process.cmdline():
                process.kill()


def run(command: str, project: Path, kill_after: int = 0) -> list[tuple[float, str]]:
    """The lines of a command, each with the seconds before it."""
    lines, last = [(1.0, f"$ {command}")], time.monotonic()
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(["bash", "-c", command], cwd=project, **out)
    if kill_after:
        given = (child, project / "runs" / "killed" / "metrics.jsonl", kill_after)
        threading.Thread(target=kill, args=given, daemon=True).start()
    for line in child.stdout:
        now = time.monotonic()
        lines.append((min(now - last, 1.0), line.rstrip()))
        last = now
    child.wait()
    return lines


def draw(lines: list[tuple[float, str]]) -> str:
    """The lines as an SVG: all of them for a while, then each at its time, again and again."""
    total, clock, texts = sum(pause for pause, _ in lines) + HOLD, HOLD, []
    for number, (pause, line) in enumerate(lines):
        clock += pause
        if len(line) > WIDTH:
            sys.exit(f"a line is longer than {WIDTH} characters: {line}")
        shown = html.escape(line).replace(" ", "\xa0")  # browsers collapse blanks
        color = COLORS.get(line[:1], "#e5e7eb")
        texts.append(
            f'<text x="12" y="{24 + ROW * number}" fill="{color}">{shown}'
            f'<animate attributeName="opacity" values="1;0;1" '
            f'keyTimes="0;{HOLD / total:.4f};{clock / total:.4f}" '
            f'calcMode="discrete" dur="{total:.1f}s" repeatCount="indefinite"/></text>'
        )
    height = 24 + ROW * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 {height}" width="840" '
        f'height="{height}" font-family="monospace" font-size="13">'
        f"<title>{html.escape(__doc__.splitlines()[0])}</title>\n"
        f'<rect width="840" height="{height}" rx="8" fill="#111827"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def main() -> None:
    project = Path(sys.argv[1])
    for name in ("killed", "whole"):
        shutil.rmtree(project / "runs" / name, ignore_errors=True)
    run("make prepare RECIPE=smoke", project)
    lines = run(SHOWN.format("killed"), project, kill_after=30)
    lines += run(SHOWN.format("killed"), project)
    lines += run(TRAIN.format("whole") + " >/dev/null", project)
    lines += run(SUMS, project)
    (Path(__file__).parent / "killed.svg").write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
