"""Speed of devices, of what connects them, and of the project's own step; names slow devices."""

from collections.abc import Sequence

from samestep.base.console import one_line, print_on_main
from samestep.hardware.devices import Devices, ask
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, short

MiB = 1 << 20
# Rows of a matrix; bytes of a copy, more than caches hold; bytes of an all-reduce.
SIZES = {
    "cpu": {"matrix": 128, "copy": 4 * MiB, "sizes": [4096, MiB]},
    "mps": {"matrix": 4096, "copy": 256 * MiB, "sizes": []},
    "cuda": {"matrix": 8192, "copy": 256 * MiB, "sizes": [4096, MiB, 256 * MiB]},
}
UNITS = {"matmul": "TFLOP/s", "training": "samples/s", "latency": "us"}  # others: GB/s
# Of the fastest: so far behind it a device should get less work, or none.
UNEQUAL, LEFT_OUT = 0.2, 0.5


def run(used: Devices, project: Project, flags: list[str], seconds: float) -> Section:
    """Measures all devices at the same time, as in training."""
    recipe = one_line(" ".join([str(project.recipe), *flags]))
    section = Section("bench", {"recipe": recipe, "precision": used.precision})
    print_on_main(f"measuring {used.count} x {used.kind}: about {seconds:g} s for each figure")
    options = {"seconds": seconds, "flags": flags, "precision": used.precision, **SIZES[used.kind]}
    given = [{"device": used.name(number), **options} for number in range(used.count)]
    answers = {str(number): answer for number, answer in enumerate(ask("measure", *given))}
    if used.count > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", used.count]
        (answers["links"],) = ask("links", {"kind": used.kind, **options}, launcher=torchrun)
    names, steps, products = [], [], []
    for place, (found, problem) in answers.items():
        if problem:
            section.failures.append(f"not measured: {place}: {problem}")
            continue
        section.failures += found["wrong"]
        for name, value in found["figures"].items():
            peak = found["peaks"].get(name.removeprefix("matmul "))
            unit = UNITS.get(name.partition(" ")[0], "GB/s")
            section.figures.append(Figure(name, value, unit, place, peak))
        if place != "links":
            names.append(found["name"])
            steps.append(found["figures"]["training step"])
            products.append(found["figures"]["matmul bf16"])
    section.figures.sort(key=lambda each: each.name)  # devices side by side
    section.facts["devices"] = f"{len(names)} x {', '.join(dict.fromkeys(names))}"
    if used.kind == "cuda" and not section.failures:
        section.lines = advise(names, steps, products)
    return section


def advise(names: Sequence[str], steps: Sequence[float], products: Sequence[float]) -> list[str]:
    """Names slow devices by the speeds of their training steps and their matrix products, and what
    each way out would give; the best first."""
    behind: dict[int, float] = {}  # the fraction by which a device is slower
    lines = []
    for what, speeds in (("matrix products, TFLOP/s", products), ("step, samples/s", steps)):
        for rank, speed in enumerate(speeds):
            if speed < (1 - UNEQUAL) * max(speeds):
                behind[rank] = 1 - speed / max(speeds)
                lines.append(
                    f"slow device: {rank} ({names[rank]}), {what}: {short(speed)}, "
                    f"{behind[rank]:.0%} behind the fastest with {short(max(speeds))}"
                )
    if not behind:
        return [f"no device is more than {UNEQUAL:.0%} behind the fastest"] if steps[1:] else []
    useless = [rank for rank, share in behind.items() if share > LEFT_OUT]
    if len(useless) == len(steps):  # each in something else
        useless = []
    out = sorted(useless or behind)
    left = [speed for rank, speed in enumerate(steps) if rank not in out]
    shares = ", ".join(f"{speed / min(steps):.3g}" for speed in steps)
    named = ", ".join(map(str, out))
    ways = {  # the samples per second that each gives; of equal ones the simplest comes first
        "use all equally: --device_shares equal": len(steps) * min(steps),
        f'unequal shares: --device_shares "[{shares}]", or auto': sum(steps),
        f"leave out {named}: CUDA_VISIBLE_DEVICES": len(left) * min(left, default=0),
    }
    rule = f"{UNEQUAL:.0%} behind: unequal shares"
    if useless:
        rule = f"{LEFT_OUT:.0%} behind: leave out {named}"
    lines.append(f"rule of thumb, for more than {rule}; measure again before you act")
    best = sorted(ways, key=lambda way: -ways[way])
    return lines + [f"at most {short(ways[way])} samples/s: {way}" for way in best]
