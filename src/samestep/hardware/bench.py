"""Speed of devices, of what connects them, and of the project's own step; names slow devices."""

from collections.abc import Sequence

from samestep.base.console import one_line, print_on_main
from samestep.hardware.devices import Devices, ask
from samestep.hardware.project import Project
from samestep.hardware.report import Section

MiB = 1 << 20
# Rows of a matrix; bytes of a copy, more than caches hold; bytes of an all-reduce.
SIZES = {
    "cpu": {"matrix": 128, "copy": 4 * MiB, "sizes": [4096, MiB]},
    "mps": {"matrix": 4096, "copy": 256 * MiB, "sizes": []},
    "cuda": {"matrix": 8192, "copy": 256 * MiB, "sizes": [4096, MiB, 256 * MiB]},
}
# Of the fastest: so far behind it a device should get less work, or none.
UNEQUAL, LEFT_OUT = 0.2, 0.5


def run(section: Section, used: Devices, project: Project, flags: list[str], time: float) -> None:
    """Measures all devices at the same time, as in training; raises Wrong."""
    section.facts["recipe"] = one_line(" ".join([str(project.recipe), *flags]))
    section.facts["precision"] = used.precision
    print_on_main(f"measuring {used.count} x {used.kind}: about {time:g} s for each figure")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", used.count]
    given = {"kind": used.kind, "precision": used.precision, **SIZES[used.kind]}
    answers = ask("bench", torchrun, seconds=time, flags=flags, **given)
    names = [name for name, _, _ in answers]
    section.facts["devices"] = f"{len(names)} x {', '.join(dict.fromkeys(names))}"
    for rank, (_, _, problem) in enumerate(answers):
        if problem:
            section.failures.append(f"not measured: {rank}: {problem}")
    if not section.failures:
        figures = [found for _, found, _ in answers]
        section.figures = {name: [each[name] for each in figures] for name in figures[0]}
    if used.kind == "cuda" and used.count > 1:
        for name in ("matmul bf16, TFLOP/s", "training step, samples/s"):
            section.lines += advise(names, name, section.figures.get(name, []))


def advise(names: Sequence[str], what: str, speeds: Sequence[float]) -> list[str]:
    """Names slow devices, and what people do about them."""
    lines = []
    for rank, speed in enumerate(speeds):
        behind = 1 - speed / max(speeds)
        advice = "give it less work, by --device_shares auto"
        if behind > LEFT_OUT:
            advice = "leave it out, by CUDA_VISIBLE_DEVICES"
        if behind > UNEQUAL:
            lines.append(
                f"slow device: {rank} ({names[rank]}) is {behind:.0%} behind the fastest in "
                f"{what}; measure again, then {advice}"
            )
    return lines
