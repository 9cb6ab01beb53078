"""Records docs/killed.svg: a run is killed, and resumes by the same command.

    make demo
    .venv/bin/python docs/record.py demo/my_training

Lines and their times are those of the runs; pauses longer than a second are shortened to one. The
data is prepared before. All lines are shown first, so that a reader without animation sees them.
"""

import html
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = 'make train RECIPE=smoke ARGS="--output_dir runs/{}"'
SUMS = "sha256sum runs/killed/model/model.safetensors runs/whole/model/model.safetensors"
COLORS = {"$": "#7dd3fc", "K": "#fca5a5", "#": "#9ca3af"}  # by the first character of a line
WIDTH, ROW, HOLD = 104, 18, 8.0


def run(command: str, project: Path, kill_at: str = "") -> list[tuple[float, str]]:
    """The lines of a command, each with the seconds before it."""
    lines, last = [(1.0, f"$ {command}")], time.monotonic()
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, shell=True, cwd=project, start_new_session=True, **out)
    for line in child.stdout:
        now = time.monotonic()
        lines.append((min(now - last, 1.0), line.rstrip()))
        last = now
        if kill_at and line.startswith(kill_at):
            os.killpg(child.pid, signal.SIGKILL)
            lines.append((0.5, "Killed                        # kill -9"))
            break
    child.wait()
    return lines


def draw(lines: list[tuple[float, str]]) -> str:
    """The lines as an SVG: all of them for a while, then each at its time, again and again."""
    total, clock, texts = sum(pause for pause, _ in lines) + HOLD, HOLD, []
    for number, (pause, line) in enumerate(lines):
        clock += pause
        shown = html.escape(line if len(line) <= WIDTH else line[: WIDTH - 3] + "...")
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
        f'height="{height}" font-family="monospace" font-size="13" xml:space="preserve">'
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
    lines = run(TRAIN.format("killed"), project, kill_at="step 30/")
    lines += run(TRAIN.format("killed"), project)
    whole = run(TRAIN.format("whole"), project)
    lines += [whole[0], (1.0, f"# ... {len(whole) - 1} lines"), whole[-1]]
    lines += run(SUMS, project)
    (Path(__file__).parent / "killed.svg").write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
