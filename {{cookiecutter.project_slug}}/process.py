"""What surrounds the loop: the processes of a run, what asks them to stop, how they end."""

import atexit
import contextlib
import datetime
import errno
import hashlib
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from safetensors import safe_open
from safetensors.torch import load_file

import checkpoints
from tracking import IS_MAIN, one_line, protect_output, say

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # in the whole run, as the launcher says
NOT_MAIN = "no answer from process 0"
STOPPED = 75  # exit code: stopped on request; start it again to continue
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def launcher() -> int | None:
    """The process id of `accelerate launch`, where it is the parent.

    Launching one process it forwards no signal: it dies, and leaves that process behind. Other
    parents may go: `nohup python train.py &` outlives its shell.
    """
    try:
        words = psutil.Process(os.getppid()).cmdline()[:3]
    except psutil.Error:  # the first process of a container, or somebody else's
        return None
    names = ("accelerate", "accelerate-launch")
    module = "accelerate.commands.launch"  # as `python -m`, or in the program of launch.py
    found = any(Path(word).name in names or module in word for word in words)
    return os.getppid() if found else None


LAUNCHER = launcher()  # asked early: it may be gone when training begins


# ---- Errors --------------------------------------------------------------------------------------


class UserError(ValueError):
    """What whoever started the run has to change: shown as one line, exit code 2."""


class Failed(RuntimeError):
    """What ended another process of the run: shown as one line, exit code 1."""


def ask(function, *arguments):
    """Calls a function whose ValueError is meant for whoever started the run.

    Input may also be too large or too deep, or name a file that cannot be read: the errors of
    Python, torch and the system that say so are meant for them too.
    """
    try:
        return function(*arguments)
    except (ValueError, OverflowError, RecursionError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        if error.errno not in checkpoints.LASTING:  # a crash, which is tried again
            raise
        raise UserError(about(error)) from error
    except (MemoryError, RuntimeError) as error:
        # What torch says of a size that no machine has. A GPU may have room the next time.
        sizes = "DefaultCPUAllocator|overflow|negative dimension"
        if not isinstance(error, MemoryError) and not re.search(sizes, str(error)):
            raise
        raise UserError(f"there is not enough memory for these settings: {error}") from error


def about(error: OSError) -> str:
    """What the system refused, and for which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def is_full_memory(error: BaseException) -> bool:
    """Whether the memory of the machine or of a GPU ran out."""
    words = r"out of memory|not enough memory|allocate memory"
    full = isinstance(error, RuntimeError) and re.search(words, str(error))
    return bool(full) or isinstance(error, MemoryError)


def attempt(function, *arguments) -> tuple:
    """A function's result and None, or None and its exception: for Ranks.settle to share."""
    try:
        return function(*arguments), None
    except Exception as error:
        return None, error


# ---- The processes of a run ----------------------------------------------------------------------


class Ranks:
    """All processes of the run: what they tell each other, in CPU memory, besides tensors.

    Made when what may take longer than the time-out is done: the processes meet here.
    """

    def __init__(self, timeout: int):
        self.group = None
        limit = datetime.timedelta(seconds=timeout)
        try:
            state = PartialState(cpu=on_cpu(), timeout=limit, **meeting_place())
        except dist.DistError as error:  # one of them never came
            raise Failed(f"waited {timeout} s for all processes to begin: {error}") from error
        if state.num_processes != PROCESSES:
            raise UserError(
                f"{PROCESSES} processes were launched, but accelerate sees {state.num_processes}; "
                "check distributed_type in the accelerate YAML"
            )
        if PROCESSES > 1:
            self.timeout = timeout
            self.group = dist.new_group(backend="gloo", timeout=limit)
            self.inquest = dist.new_group(backend="gloo", timeout=limit)  # of who is missing

    def agree(self, *numbers: int, problem: Exception | None = None) -> list[int]:
        """Sums of integers over the processes; where one has a problem, all raise it."""
        sums = torch.tensor([*numbers, problem is not None])
        if self.group:
            dist.all_reduce(sums, group=self.group)
        *sums, problems = sums.tolist()
        if problems:
            self.settle(problem)
        return sums

    def gather(self, value) -> list:
        """The value of each process, in the order of their ranks."""
        values = [value] * PROCESSES
        if self.group:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def settle(self, problem: Exception | None) -> None:
        """Raises on every process what any of them has met, each distinct problem once."""
        told = None
        if problem:
            told = (isinstance(problem, UserError), str(problem) or repr(problem))
            if not told[0]:
                told = (False, f"{type(problem).__name__}: {told[1]}")
        who = f"process {os.environ.get('RANK', 0)} on {socket.gethostname()}"
        problems = [(told, who) for told, who in self.gather((told, who)) if told]
        if not problems:
            return
        if problem and not told[0]:
            raise problem  # with its traceback
        lines = {text: None for (_, text), _ in problems}
        if len(problems) < PROCESSES:
            lines = {f"{who}: {text}": None for (_, text), who in problems}
        kind = UserError if all(told[0] for told, _ in problems) else Failed
        raise kind("; ".join(lines))

    def together(self, function, *arguments):
        """Calls a function on every process; where it fails on one, all fail with its reason."""
        result, problem = attempt(function, *arguments)
        self.settle(problem)
        return result

    def alone(self, function, *arguments):
        """Calls a function on the main process; all get its result, or fail with its reason."""
        return self.gather(self.together(function if IS_MAIN else lambda *_: None, *arguments))[0]

    def blame(self, error: BaseException) -> BaseException:
        """An error of gloo as one line that says who does not answer; any other as it is."""
        if not isinstance(error, RuntimeError) or "gloo/transport" not in str(error):
            return error
        if "Timed out" not in str(error):
            return Failed("lost the connection to another process, which has died")
        try:
            brief = datetime.timedelta(seconds=5)
            dist.monitored_barrier(self.inquest, timeout=brief, wait_all_ranks=True)
            missing = "all answer now"
        except RuntimeError as reply:
            ranks = str(reply).partition("Ranks ")[2].partition(" failed")[0] or "0"
            missing = f"no answer from process {ranks}"
        return Failed(f"waited {self.timeout} s for the other processes; {missing}")


def meeting_place() -> dict:
    """Where processes meet that torchelastic has started again (`--max_restarts`); else nothing.

    Its store still holds the addresses of those that died; these write under names of their own.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0":
        return {}
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    place = {"rank": int(os.environ["RANK"]), "world_size": PROCESSES}
    return {"store": dist.PrefixStore(f"restart-{restarts}", store), **place}


def on_cpu() -> bool:
    """Whether to stay on the CPU; untold, accelerate would take each of several for alone."""
    gpu = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    return parse_flag_from_env("ACCELERATE_USE_CPU") or (PROCESSES > 1 and not gpu)


def check(accelerator) -> None:
    """Raises ValueError where what accelerate made is not what its YAML asked for."""
    if accelerator.device.type != "cpu":
        return
    names = ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES")
    use_cpu, hidden = [os.environ.get(name, "") for name in names]
    # The launcher says False, or nothing, for the YAMLs that want GPUs.
    if use_cpu == "False" or (PROCESSES > 1 and not use_cpu and not hidden):
        raise ValueError(
            "there is no GPU, which the launcher was told to use; give it --config_file "
            "configs/accelerate/cpu.yaml"
        )
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision fp16 needs a GPU; write 'no' in the accelerate YAML")


def enable_gradient_checkpointing(model: torch.nn.Module) -> None:
    """Tells a model of transformers or diffusers to recompute activations in its backward pass."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)()
            return
    raise ValueError("gradient_checkpointing is true, but the model of task.py cannot do it")


def sync_batch_norms(model: torch.nn.Module, accelerator) -> torch.nn.Module:
    """The model; with BatchNorm it is warned of, and on several GPUs made to span them all.

    Its statistics are those of a micro-batch, on all GPUs at best, so that promises about the cut
    of a step do not hold for it. GroupNorm and LayerNorm have no such dependence.
    """
    kinds = torch.nn.modules.batchnorm._BatchNorm
    if not any(isinstance(module, kinds) for module in model.modules()):
        return model
    say("warning: the model has BatchNorm, so its result depends on how a step is cut; see README")
    if PROCESSES > 1 and accelerator.device.type == "cuda":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of the CPU and of this device, from which dropout draws.

    torch.manual_seed does it for all devices, and costs 180 us where CUDA is not in use: it formats
    a stack trace.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.manual_seed(seed)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Each group's settings, as the optimizer was built: its class, weight_decay, betas, ..."""
    kind = {"class": type(optimizer).__name__}
    return [
        kind | {n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups
    ]


def as_text(settings: list[dict]) -> list[dict[str, str]]:
    """An optimizer's settings for a manifest, which has no tensors and no tuples."""
    return [{name: in_full(value) for name, value in group.items()} for group in settings]


def in_full(value) -> str:
    """A setting as text, with all its digits: torch prints four of a tensor's."""
    return repr(value.tolist() if torch.is_tensor(value) else value)


def load_checkpoint(
    accelerator, optimizer, settings: list[dict], path: Path, manifest: dict
) -> None:
    """Restores weights, optimizer and random numbers; raises ValueError where they do not fit.

    Loading an optimizer brings its old settings back: those that it is built with now take their
    place where they differ. The others stay, since some optimizers keep a state among them.
    """
    before, now = manifest["optimizer"], as_text(settings)
    kinds = [[group["class"] for group in each] for each in (before, now)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{path} was trained with {' and '.join(kinds[0])}, and build_optimizer gives "
            f"{' and '.join(kinds[1])}, a group each; go back to that, or give another --output_dir"
        )
    if accelerator.scaler and not (path / "scaler.pt").exists():
        raise ValueError(f"{path} was not trained in fp16; go on with a YAML like its own")
    accelerator.load_state(path)
    accelerator.step = 0  # counts micro-batches of another cut, perhaps; here a step begins
    for group, built, old in zip(optimizer.param_groups, settings, before, strict=True):
        changed = {n: v for n, v in built.items() if n != "class" and in_full(v) != old.get(n)}
        group.update(changed)


FROZEN = "frozen_weights_sha256"  # an entry of model.safetensors: 32 bytes
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def save_bare_models(accelerator) -> None:
    """Makes checkpoints hold the bare model's names, without what DDP and torch.compile prepend.

    So any number of processes can go on from them. Weights that do not train are not saved, as they
    come with the pretrained model; their digest is. Sharded models do not pass these hooks.
    """

    def bare(model) -> torch.nn.Module:
        return accelerator.unwrap_model(model, keep_torch_compile=False)

    def save_bare(models: list, weights: list, _) -> None:
        weights[:] = [unshared(trained_weights(bare(model))) for model in models] if weights else []

    def load_bare(models: list, folder: str) -> None:
        load_trained(bare(models.pop()), Path(folder, "model.safetensors"))

    accelerator.register_save_state_pre_hook(save_bare)
    accelerator.register_load_state_pre_hook(load_bare)


def unshared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state in which tensors share a storage only if they are the same, as tied weights are.

    accelerate saves one tensor of each storage; of parts of one it would lose all but the first.
    """
    first: dict[int, tuple] = {}
    for name, values in state.items():
        place = (values.data_ptr(), values.shape, values.stride())
        if first.setdefault(values.untyped_storage().data_ptr(), place) != place:
            state[name] = values.clone()
    return state


def check_fit(state: dict[str, torch.Tensor], file: Path) -> None:
    """Raises UserError unless a file has the weights of a model's state, in their shapes."""
    with safe_open(file, "pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}
    # Of tied weights, which have several names, the file has one.
    kept = {state[name].data_ptr() for name in shapes if name in state}
    wanted = {
        name: tuple(values.shape)
        for name, values in state.items()
        if name in shapes or values.data_ptr() not in kept
    }
    for name in sorted({**shapes, **wanted}):
        if shapes.get(name) != wanted.get(name):
            found = [str(each.get(name, "not there")) for each in (shapes, wanted)]
            raise UserError(
                f"{file.parent} does not fit the model: {name} is {found[0]} in the checkpoint and "
                f"{found[1]} in the model; give the settings and the task.py that it was made "
                "with, or another --output_dir"
            )


def load_trained(model: torch.nn.Module, file: Path) -> None:
    """Loads the weights that train; raises UserError where the others are not those of then."""
    state = trained_weights(model)
    check_fit(state, file)
    weights = load_file(file)
    if FROZEN in state and not torch.equal(weights.pop(FROZEN), state[FROZEN]):
        raise UserError(
            f"{file.parent} was trained on other pretrained weights; give those, or another "
            "--output_dir"
        )
    model.load_state_dict(weights, strict=False)


def load_best(accelerator, ranks: Ranks, folder: Path, facts: dict) -> int | None:
    """Loads the checkpoint with the smallest eval_loss; gives its step, or None without one.

    For `facts` see `checkpoints.best`.
    """
    best, loss = ranks.alone(checkpoints.find_best, folder, facts)
    if best is None:
        say("no checkpoint has a finite eval_loss: the last model takes the place of the best")
        return None
    ranks.together(ask, accelerator.load_state, best)
    say(f"the best evaluation was that of step {checkpoints.step_of(best)}: {loss:.5g}")
    return checkpoints.step_of(best)


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, without parameters that do not train, but with a digest of these."""
    state = model.state_dict()
    named = model.named_parameters(remove_duplicate=False)  # tied weights have two names
    frozen = [(name, values.detach()) for name, values in named if not values.requires_grad]
    if frozen:
        digest = hashlib.sha256()
        for name, values in frozen:
            state.pop(name, None)
            # Sums of 64 slices, of the bits as integers: the same on any device, in any order.
            bits = values.flatten().view(BITS[values.element_size()])
            sums = torch.stack([part.sum(dtype=torch.int64) for part in bits.chunk(64)])
            digest.update(name.encode() + sums.cpu().numpy().tobytes())
        state[FROZEN] = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    return state


# ---- Stopping and ending -------------------------------------------------------------------------


class StopRequest:
    """Whether this process was asked to stop: by a signal, or by the death of its launcher.

    Until `training` is set there is nothing to save, and a signal ends the process. Afterwards it
    sets a flag, nothing else; the ranks agree on it between two steps, and save. A second Ctrl-C,
    more than a second after the first, ends the process at once.
    """

    def __init__(self):
        self.training, self.since = False, None
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                signal.signal(number, self.handle)
        if sys.platform == "linux":  # Python 3.14 would start workers from a server, unshielded
            multiprocessing.set_start_method("fork", force=True)
        os.register_at_fork(before=self.shield, after_in_parent=self.unshield)
        atexit.register(kill_workers)  # before multiprocessing waits for them, as it came later

    def handle(self, number, _) -> None:
        """Handles a signal. One Ctrl-C may arrive twice: from the terminal and torchelastic."""
        if number == signal.SIGINT and self.since and time.monotonic() - self.since > 1:
            os._exit(128 + number)
        self.since = self.since or time.monotonic()
        if not self.training:
            sys.exit(STOPPED)

    def shield(self) -> None:
        """Keeps signals from worker processes from their first moment: they inherit what blocks."""
        if self.training:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unshield(self) -> None:
        """Lets the training process hear again, also what came meanwhile."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def asked(self) -> int:
        """1 if so, else 0: a number, for ranks to add up."""
        orphaned = LAUNCHER is not None and os.getppid() != LAUNCHER
        return int(orphaned or self.since is not None)


def run(main, prepare) -> None:
    """Exits with the code of main(prepare(), ranks, stop); a UserError is one line, and code 2.

    `prepare` is called before the processes meet; its result has a `cfg` and an `output` folder.
    How a run failed is written to its status.json; one that was refused leaves alone what another
    run has written there.
    """
    protect_output()
    stop, start, ranks = StopRequest(), None, None
    try:
        allow_files()
        start, problem = attempt(ask, prepare)
        ranks, missing = attempt(Ranks, start.cfg.timeout if start else 600)
        if missing:
            raise problem or missing
        ranks.settle(problem)
        code = main(start, ranks, stop)
    except BaseException as error:
        stop.training = True  # the launcher's answer to the end of another process comes too late
        error = ranks.blame(error) if ranks else error
        code, line = judge(error)
        # Who does not answer cannot say so: another process does, and it stays at that one line.
        speaks = IS_MAIN or NOT_MAIN in (line or "")
        if speaks and start:
            state = "stopped" if code == STOPPED else "failed"
            ended = attempt(checkpoints.end_status, start.output, state, line or repr(error), code)
            speaks = ended[0] is not False
        if line and speaks:
            print(f"train.py: {one_line(line, 1000)}", file=sys.stderr)
        if not line and not isinstance(error, SystemExit):
            traceback.print_exception(error)
    if IS_MAIN and start:
        start.lock.undo()
    leave(code)


def judge(error: BaseException) -> tuple[int, str | None]:
    """The exit code for what ended a run, and one line about it; None: it is worth a traceback."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, Failed):
        return 1, f"{error}; the same command continues from the newest checkpoint"
    if isinstance(error, OSError) and error.errno in checkpoints.DISK_FULL:
        return 2, f"{error}: free some space; what was saved is kept"
    if isinstance(error, RuntimeError) and "Expected to have finished reduction" in str(error):
        return 2, (
            "some weights of the model get no gradient, which several processes wait for; call "
            "requires_grad_(False) on them in build_model of task.py, or train with one process"
        )
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return 2, f"{about(error)}: let this process open more of them, with ulimit -n"
    if isinstance(error, FileNotFoundError) and error.strerror == checkpoints.REMOVED:
        return 1, about(error)
    if is_full_memory(error):
        return 1, f"the memory is full: {error}; lower --micro_batch_size and start again"
    if isinstance(error, SystemExit) and error.code == STOPPED:
        return STOPPED, "stopped before the first step: there is nothing to save"
    if isinstance(error, SystemExit):
        return (1, error.code) if isinstance(error.code, str) else (error.code or 0, None)
    return 1, None


def allow_files() -> None:
    """Lets this process open more files, as loaders need many; raises UserError if it may not."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < 64:
        raise UserError(
            f"no more than {wanted} files may be open at once; first say ulimit -n 1024"
        )


def tell(code: int) -> None:
    """Hands the exit code to launch.py of this machine: accelerate would turn it into 1."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and "EXIT_CODE_FILE" in os.environ:
        attempt(Path(os.environ["EXIT_CODE_FILE"]).write_text, str(code))


def ignore_signals(_) -> None:
    """For worker processes of a loader: signals to the whole group are the training process's."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_workers() -> None:
    """Ends what ignores the signal with which multiprocessing would end it at exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for a crash
    for worker in multiprocessing.active_children():
        worker.kill()


def leave(code: int) -> None:
    """Ends a process with this code; one of several without the interpreter's last steps.

    A thread of gloo that drops a tensor meanwhile would abort the process (pytorch #190489), and a
    finished run would exit with 1. What those steps do first is done here.
    """
    tell(code)
    if PROCESSES == 1:
        sys.exit(code)
    with contextlib.suppress(SystemExit):
        sys.exit(code)  # tells W&B, which has put a function of its own there
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
