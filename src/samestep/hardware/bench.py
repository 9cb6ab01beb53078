"""Speed of devices, of what connects them, and of the project's own step; names slow devices."""

from collections.abc import Sequence

from samestep.base.console import one_line, print_on_main
from samestep.hardware.devices import Devices, ask
from samestep.hardware.project import Project
from samestep.hardware.report import Figure, Section, short

MiB = 1 << 20
# Rows of a matrix, and bytes that are copied, more than caches hold; bytes of an all-reduce.
SIZES = {
    "cpu": {"matrix": 128, "copy": 4 * MiB},
    "mps": {"matrix": 4096, "copy": 256 * MiB},
    "cuda": {"matrix": 8192, "copy": 256 * MiB},
}
REDUCED = {"cpu": [4096, MiB], "cuda": [4096, MiB, 256 * MiB]}
UNITS = {"matmul": "TFLOP/s", "training": "samples/s"}  # by a name's first word; others: GB/s
STEP = "training step"
# Of the fastest: so far behind it a device should get less work, or none.
UNEQUAL, LEFT_OUT = 0.2, 0.5


def run(used: Devices, project: Project, flags: list[str], seconds: float) -> Section:
    """Measures all devices at the same time, as in training."""
    recipe = one_line(" ".join([str(project.recipe), *flags]))
    section = Section("bench", {"recipe": recipe, "precision": used.precision})
    print_on_main(f"measuring {used.count} x {used.kind}: about {seconds:g} s for each figure")
    sizes = SIZES[used.kind]
    options = {"seconds": seconds, "flags": flags, "precision": used.precision, **sizes}
    answers = ask("measure", *({"device": used.name(n), **options} for n in range(used.count)))
    for number, (found, problem) in enumerate(answers):
        if problem:
            section.failures.append(f"device {number} was not measured: {problem}")
            return section
        for name, value in found["figures"].items():
            peak = found["peaks"].get(name.removeprefix("matmul "))
            unit = UNITS.get(name.partition(" ")[0], "GB/s")
            section.figures.append(Figure(name, value, unit, str(number), peak))
    names = [found["name"] for found, _ in answers]
    section.facts["devices"] = f"{used.count} x {', '.join(dict.fromkeys(names))}"
    product = f"matmul {used.precision.replace('no', 'fp32')}"
    products, steps = (
        [found["figures"].get(name, 0.0) for found, _ in answers] for name in (product, STEP)
    )
    if used.kind != "cpu":  # there is one, and its processes share it
        section.lines = advise(names, steps, products)
    if used.count > 1:
        measure_links(section, used)
    order = list(dict.fromkeys(each.name for each in section.figures))
    section.figures.sort(key=lambda each: order.index(each.name))  # devices side by side
    return section


def measure_links(section: Section, used: Devices) -> None:
    """Adds the speeds of all-reduce and of copies between devices, and what arrived wrong."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", used.count]
    options = {"kind": used.kind, "sizes": REDUCED[used.kind], "copy": SIZES[used.kind]["copy"]}
    ((found, problem),) = ask("links", options, launcher=torchrun)
    if problem:
        section.failures.append(f"the devices do not reach each other: {problem}")
        return
    for size, value in found["latency"].items():
        section.figures.append(Figure(f"all-reduce latency, {size}", value, "us"))
    for size, value in found["bandwidth"].items():
        section.figures.append(Figure(f"all-reduce bandwidth, {size}", value, "GB/s"))
    for pair, value in found["copies"].items():
        section.figures.append(Figure("copy", value, "GB/s", pair))
    section.failures += [f"{line}; try NCCL_P2P_DISABLE=1" for line in found["wrong"]]


def advise(names: Sequence[str], steps: Sequence[float], products: Sequence[float]) -> list[str]:
    """Names slow devices, and what each way out would give; the best first.

    For each device its name, the samples per second of its training step, and the TFLOP/s of its
    matrix products; 0: not measured.
    """
    behind: dict[int, float] = {}  # the fraction by which a device is slower
    lines = []
    for what, speeds in (("matrix products, TFLOP/s", products), ("step, samples/s", steps)):
        fastest = max(speeds) if all(speeds) else 0
        for rank, speed in enumerate(speeds):
            if speed < (1 - UNEQUAL) * fastest:
                behind[rank] = 1 - speed / fastest
                lines.append(
                    f"slow device: {rank} ({names[rank]}), {what}: {short(speed)}, "
                    f"{behind[rank]:.0%} behind the fastest with {short(fastest)}"
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
    for way in sorted(ways, key=lambda way: -ways[way]):
        speed = short(ways[way])
        lines.append(f"at most {speed} samples/s, without the time of communication: {way}")
    return lines
