"""What surrounds the loop: how this process was launched, what asks it to stop, how it ends."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

import checkpoints
from tracking import IS_MAIN

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # in the whole run, as the launcher says
STOPPED = 75  # exit code: stopped on request after saving; start it again to continue
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def launcher() -> int | None:
    """The process id of `accelerate launch`, where it is the parent.

    Launching one process it forwards no signal: it dies, and leaves that process behind. Other
    parents may go: `nohup python train.py &` outlives its shell.
    """
    try:
        words = psutil.Process(os.getppid()).cmdline()[:3]
    except psutil.Error:  # the first process of a container, or somebody else's
        return None
    names = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
    return os.getppid() if any(Path(word).name in names for word in words) else None


LAUNCHER = launcher()  # asked early: it may be gone when training begins


class UserError(ValueError):
    """What whoever started the run has to change: shown as one line, exit code 2."""


def ask(function, *arguments):
    """Calls a function whose ValueError is meant for whoever started the run."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from error


def run(main, read_config) -> None:
    """Exits with the code of main(read_config()); a UserError is one line, and code 2.

    How a run failed is written to its status.json; one that was refused leaves alone what another
    run has written there.
    """
    output = None
    try:
        config = read_config()
        output = Path(config.output_dir)
        code = main(config)
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
        if IS_MAIN and output and checkpoints.read_status(output).get("pid") == os.getpid():
            reason = str(error) or repr(error)
            checkpoints.write_status(output, "failed", reason=reason, exit_code=code)
        if code == 1:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr)
    sys.exit(code)


def on_cpu() -> bool:
    """Whether several processes run without GPUs; untold, accelerate would take each for alone."""
    gpu = torch.accelerator.is_available() and not torch.backends.mps.is_available()
    return PROCESSES > 1 and not gpu


def check(accelerator) -> None:
    """Raises ValueError where what accelerate made is not what its YAML asked for."""
    if accelerator.num_processes != PROCESSES:
        raise ValueError(
            f"{PROCESSES} processes were launched, but accelerate sees "
            f"{accelerator.num_processes}; check distributed_type in the accelerate YAML"
        )
    if accelerator.device.type != "cpu":
        return
    names = ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES")
    use_cpu, hidden = [os.environ.get(name, "") for name in names]
    # The launcher says False, or nothing, for the YAMLs that want GPUs.
    if use_cpu == "False" or (PROCESSES > 1 and not use_cpu and not hidden):
        raise ValueError("there is no GPU, which the accelerate YAML asks for; take cpu.yaml")
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision fp16 needs a GPU; write 'no' in the accelerate YAML")


def save_bare_models(accelerator) -> None:
    """Makes checkpoints hold the bare model's names, without what DDP and torch.compile prepend.

    So any number of processes can go on from them. Sharded models do not pass these hooks.
    """

    def bare(models: list) -> list:
        return [accelerator.unwrap_model(model, keep_torch_compile=False) for model in models]

    def save_bare(models: list, weights: list, _) -> None:
        weights[:] = [model.state_dict() for model in bare(models)] if weights else []

    def load_bare(models: list, _) -> None:
        models[:] = bare(models)

    accelerator.register_save_state_pre_hook(save_bare)
    accelerator.register_load_state_pre_hook(load_bare)


class StopRequest:
    """Whether this process was asked to stop: by a signal, or by the death of its launcher.

    Asking sets a flag, nothing else; the ranks agree on it between two steps, and save. A second
    Ctrl-C, more than a second after the first, ends the process at once.
    """

    def __init__(self):
        self.since = None
        for number in SIGNALS:
            signal.signal(number, self.handle)
        atexit.register(kill_workers)  # before multiprocessing waits for them, as it came later

    def handle(self, number, _) -> None:
        """Handles a signal. One Ctrl-C may arrive twice: from the terminal and torchelastic."""
        if number == signal.SIGINT and self.since and time.monotonic() - self.since > 1:
            os._exit(128 + number)
        self.since = self.since or time.monotonic()

    def asked(self) -> int:
        """1 if so, else 0: a number, for ranks to add up."""
        orphaned = LAUNCHER is not None and os.getppid() != LAUNCHER
        return int(orphaned or self.since is not None)


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
    """Ends a process whose work is done, without the last steps of the interpreter.

    A thread of gloo that drops a tensor meanwhile would abort the process (pytorch #190489), and a
    finished run would exit with 1. What those steps do first is done here.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
