"""Draws the curves of a run, or compares runs: loss, scores, learning rate and throughput.

    python -m samestep plot runs/a                                   writes runs/a/curves.png
    python -m samestep plot runs/a runs/b                            compares them in curves.png
    python -m samestep plot runs/a runs/b --output figures/ab.pdf    elsewhere; .png, .svg or .pdf

A run is a folder with a metrics.jsonl, finished or not. train.py draws the curves of its run at the
end. `diff runs/a/config.yaml runs/b/config.yaml` shows the settings in which two differ.
"""

from pathlib import Path

from samestep.base.console import one_line, protect_output
from samestep.programs import make_parser
from samestep.report.curves import draw


def main() -> None:
    protect_output()
    parser = make_parser("plot", __doc__)
    about = "folder of a run, such as runs/a"
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help=about)
    parser.add_argument("--output", type=Path, metavar="FILE", help="file of the figure")
    args = parser.parse_args()
    output = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / "curves.png"
    try:
        if not output.parent.is_dir() and args.output:
            raise ValueError(f"--output {output}: there is no folder {output.parent}")
        print(one_line(draw(args.runs, output), 5000))
    except Exception as error:  # matplotlib has errors of its own, besides OSError and ValueError
        parser.error(str(error))
