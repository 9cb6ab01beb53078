"""A run folder that outlives its machine: after each save it is copied to `mirror`, the manifest
last; a start takes the newest valid checkpoint of folder and mirror.

    mirror = Mirror("s3://bucket/runs/mine", Path("runs/mine"), keep=2)
    mirror.ask()                          # the main process, before anything is built
    mirror.fetch(step)                    # what is newer there than this step
    mirror.join(ranks, step)              # all processes: from here on this start writes there
    mirror.push(step)                     # after each save, behind training
    mirror.upload()                       # all processes: what is left, at the end

One process of each node uploads what its processes wrote: the nodes need not share a disk. store.py
has what lies there.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from samestep.base.console import is_main, one_line, print_on_main
from samestep.base.errors import Failed, UserError, attempt, catch
from samestep.base.files import read_json_object, replace_text
from samestep.base.launching import NO_MIRROR
from samestep.base.run_folder import RunLock
from samestep.processes.ranks import Ranks
from samestep.state import checkpoints, consistency
from samestep.state.checkpoints import MANIFEST, checkpoint_folder
from samestep.state.store import Store, list_files, reached, step_of

_TURN = 60  # seconds that others wait for the main process before they meet again


class Mirror:
    """The copy of the run folder `output` at `url`. Each process has one; without a URL it does
    nothing.

    keep, keep_every: which checkpoints stay there, see checkpoints.prune.
    grace: seconds after the signal in which a stop uploads its checkpoint.
    brings_best: whether a start downloads the checkpoint of the best evaluation, too.
    """

    def __init__(
        self, url: str, output: Path, keep: int, keep_every: int = 0, *, grace: int = 25,
        brings_best: bool = True,
    ):  # fmt: skip
        self.url = "" if os.environ.get(NO_MIRROR) else url
        self.output, self.folder = output, output / "checkpoints"
        self.keep, self.keep_every, self.grace = keep, keep_every, grace
        self.brings_best, self.main = brings_best, is_main()
        self.store: Store | None = None  # of a process that uploads
        self.ranks: Ranks | None = None
        self.lock: RunLock | None = None  # of the folder of another node
        self.changed = threading.Condition()  # of what follows
        self.saved: set[int] = set()  # steps that this start has saved, on all nodes
        self.newest = 0  # the step of the newest checkpoint in the run folder
        self.busy: int | None = None  # the step that is being uploaded
        self.followed = 0  # the step whose files this process of another node has uploaded
        self.asked = self.done = 0  # times that an upload was wanted, and the last that was tried
        self.hurries = False  # whether only the newest counts
        self.lost = ""  # why what another node has written does not come
        self.failed, self.taken = "", ""  # why the last try failed, and who owns the mirror now
        self.notes: list[dict] = []  # lines about uploads, until they are logged

    # ---- A start

    def ask(self, resume: str = "auto") -> list[str]:
        """Reach the store, on the main process; return lines to print. With resume never a run
        begins beside what is there."""
        if not self.url:
            return []
        protocol, _, place = self.url.partition("://")
        if protocol == "file" and Path(place).resolve().is_relative_to(self.output.resolve()):
            raise UserError(
                f"mirror {self.url} lies in {self.output}, which is copied; give another"
            )
        self.store = Store(self.url, secrets.token_hex(3), anew=resume == "never")
        if self.store.home != self.store.word:
            return []
        return [f"mirror {self.url} holds a run: this one begins beside it, in {self.store.shown}"]

    def fetch(self, here: dict, check: Callable | None = None) -> tuple[dict, list[str]]:
        """Download the newest valid checkpoint that is newer than that with the manifest `here`,
        empty without any; return its manifest, and lines to print.

        check: see Store.download. Raises UserError if checkpoints are there, and none can be used.
        """
        if not self.store:
            return {}, []
        store, lines, found, step = self.store, [], {}, here.get("step", -1)
        with reached(self.url):
            # Listed anew for each: the start before may live, and delete.
            while (there := store.complete()) and step_of(there[0]) > step and not found:
                found = self.download(there[0], lines, check, True)
            if check and there and not lines:  # they may be of another run
                newest = f"checkpoints/{there[0]}"
                saved = catch(json.loads, store.read(f"{newest}/{MANIFEST}") or "")[0]
                if saved:
                    check(f"{store.shown}/{newest}", saved)
            if lines and not (found or here):
                first = lines[0].partition(": ")[2]
                raise UserError(f"no checkpoint in mirror {store.shown} is valid ({first})")
            best = ((found or here).get("best") or [None])[0] if self.brings_best else None
            if best and catch(checkpoints.verify, checkpoint_folder(self.folder, best), False)[1]:
                any(self.download(name, lines) for name in there if step_of(name) == best)
            if not (found or here):
                store.download_files(self.output)
        return found, lines

    def download(
        self, name: str, lines: list[str], check: Callable | None = None, files: bool = False
    ) -> dict:
        """Download a checkpoint; return its manifest, empty if it is damaged; add a line."""
        assert self.store
        began = time.perf_counter()
        saved, problem = self.store.download(name, self.folder, check, files)
        line = f"passed over in the mirror: {problem}"
        if saved:
            size = sum(about["bytes"] for about in saved["files"].values())
            took = f"{size / 1e6:,.1f} MB, {time.perf_counter() - began:.1f} s"
            line = f"downloaded {self.store.shown}/checkpoints/{name} ({took})"
        lines.append(line)
        return saved

    def find_nodes(self, ranks: Ranks) -> None:
        """Find out which processes see the main one's run folder. All processes call it."""
        if self.ranks:
            return
        self.ranks = ranks
        if not self.url:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        about = os.stat(self.output)
        shares = consistency.sees_folder(ranks, self.output)
        if any(ranks.sum_over_ranks(not shares)):
            place = None if shares else (socket.gethostname(), about.st_dev, about.st_ino)
            places = ranks.gather(place)
            ranks.nodes = [places.index(each) for each in places]

    def join(self, ranks: Ranks, step: int, brings: bool = True) -> None:
        """Write into the mirror from here on: the start that did so ends at its next save.

        step: of the newest checkpoint in the folder of the main process. brings: whether a node
        that does not see this folder gets that checkpoint into its own. All processes call it, once
        the main one has found its start.
        """
        self.find_nodes(ranks)
        if not self.url:
            return
        with ranks.fail_together(), reached(self.url):
            if self.store:
                self.store.write_owner(step)
                self.start_uploads()
                self.push(step)
        word = ranks.from_main(self.store and self.store.word)
        with ranks.fail_together():
            if not self.main and ranks.place_in_node[0] == 0:
                self.lock = RunLock(self.output)
                self.store = Store(self.url, word)
                self.start_uploads()
        if brings and step:
            self.bring(step)

    def bring(self, step: int) -> None:
        """Let the folder of each node have this checkpoint whole, if the mirror has it. All
        processes call it."""
        ranks, name = self.ranks, ""
        if not self.url or not any(ranks.nodes):
            return
        if not self.upload():
            raise Failed(f"the nodes share no run folder, and mirror {self.url} lacks a step")
        here = checkpoint_folder(self.folder, step)
        with ranks.fail_together(), reached(self.url):
            if self.main:
                name = self.store.find(step, (here / MANIFEST).read_bytes())
        name = ranks.from_main(name)
        with ranks.fail_together(), reached(self.url):
            if name and self.store and catch(checkpoints.verify, here)[1]:
                _, problem = self.store.download(name, self.folder)
                if problem:
                    raise Failed(f"mirror {self.url}: {problem}")

    # ---- In training

    def check(self) -> None:
        """Raise UserError if another start has taken the mirror over."""
        if self.taken:
            raise UserError(self.taken)

    def push(self, step: int) -> int | None:
        """Upload this step, the newest, and what else has changed, in the background; return the
        step that is being uploaded, whose checkpoint must stay."""
        with self.changed:
            self.newest, self.asked = step, self.asked + 1
            self.changed.notify_all()
            return self.busy

    def hold(self, step: int, ranks: Ranks) -> int | None:
        """Upload a step that was saved now: all processes call it. Return what `push` does."""
        self.saved.add(step)
        held = self.push(step) if self.store else None
        return ranks.from_main(held) if any(ranks.nodes) else held

    def take_notes(self) -> list[dict]:
        """Return lines about uploads that are done."""
        lines, self.notes = self.notes, []
        return lines

    # ---- An end

    def upload(self, seconds: float | None = None, alone: bool = False) -> bool:
        """Bring to the mirror what is new in the run folder, as what a script writes after its
        loop, and wait for it; return whether all of it is there. All processes call it.

        seconds: to wait, for the newest step alone; None: until the store has answered. alone:
        whether the main process calls it alone.
        """
        if not self.url or not self.ranks:
            return True
        share = self.ranks.from_main if not alone else lambda value: value
        deadline = time.monotonic() + (1e9 if seconds is None else seconds)
        with self.changed:
            self.asked, self.hurries = self.asked + 1, seconds is not None
            self.changed.notify_all()
        self.lost = "the other nodes have ended" if alone else ""
        is_over = False
        while not is_over:  # no exchange waits longer than others may
            left = deadline - time.monotonic()
            is_over = share(self.wait(min(_TURN, self.ranks.timeout / 2, left)) or left <= 0)
            if not alone and any(self.ranks.nodes):
                failed = self.ranks.gather("" if self.main else self.failed)
                self.lost = next(filter(None, failed), "")
        return share(self.tell())

    def end_failed(self) -> None:
        """Let a run that has failed bring what it has saved."""
        if self.store and self.main and self.done < self.asked:
            self.upload(self.grace, alone=True)

    def wait(self, seconds: float) -> bool:
        """Wait until the main process has tried to upload what is wanted; return whether it has."""
        with self.changed:
            is_over = lambda: self.done >= self.asked or self.taken  # noqa: E731
            return not self.main or bool(self.changed.wait_for(is_over, seconds))

    def tell(self) -> bool:
        """Say what did not reach the mirror; return whether all did."""
        if not self.main or self.taken:
            return not self.taken
        last = max(self.store.manifests, default=0)
        status = read_json_object(self.output / "status.json")
        if last and status.get("mirrored_step") != last:
            text = json.dumps({**status, "mirrored_step": last}) + "\n"
            attempt("status.json was not written", replace_text, self.output / "status.json", text)
        if self.done >= self.asked and not self.failed:
            return True
        what = f"step {self.newest} is in {self.folder} alone"
        if last == self.newest:
            what = f"not all files of {self.output} are there"
        why = self.failed or "the time was over"
        print_on_main(f"mirror {self.url} has step {last}, and {what}: {why}")
        return False

    # ---- The thread that uploads

    def start_uploads(self) -> None:
        work = self.work if self.main else self.follow
        threading.Thread(target=work, name="mirror", daemon=True).start()

    def work(self) -> None:
        """Upload on the main process: always the newest, so that a slow net skips steps."""
        while not self.taken:
            with self.changed:
                self.changed.wait_for(lambda: self.asked > self.done)
                asked, step = self.asked, self.newest
                self.busy = step
            began, before = time.perf_counter(), len(self.store.manifests)
            is_done = self.attempt(step, self.update)
            if is_done and len(self.store.manifests) > before:
                seconds = time.perf_counter() - began
                self.notes.append({"mirrored_step": step, "mirror_seconds": seconds})
            with self.changed:
                if step == self.newest or not self.hurries:  # else the newest is next
                    self.done = asked
                self.busy = None
                self.changed.notify_all()

    def attempt(self, step: int, upload: Callable[[int], bool]) -> bool:
        """Return what upload(step) does. A failure ends nothing: the next save tries again."""
        try:
            is_done = upload(step)
        except UserError as error:
            self.taken = str(error)
            self.say(self.taken)
            return False
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            if not self.failed:  # said once
                goes_on = "the run goes on, and tries again after each save"
                self.say(f"mirror {self.url} lacks step {self.busy}: {reason}; {goes_on}")
            self.failed = reason
            return False
        if is_done and self.failed:
            self.say(f"mirror {self.url} has step {self.busy} now")
            self.failed = ""
        return is_done

    def update(self, step: int) -> bool:
        """Upload what the main process has: the checkpoint, best and kept ones, other files. Return
        whether all of it is there, False if a newer step came, and counts alone."""
        store = self.store
        store.check_owner()
        files = list_files(self.output)
        in_folders = [name for name in files if "/" in name]
        # metrics.jsonl before the checkpoint of its last line.
        store.put_changed(self.output, files[: len(files) - len(in_folders)])
        best = None
        if step:
            manifest = self.upload_step(step)
            if manifest is None:
                return False
            best = (manifest.get("best") or [None])[0]
        is_kept = lambda n: n == best or bool(self.keep_every and n % self.keep_every == 0)  # noqa: E731
        there = {step_of(name) for name in store.complete()}
        for path in checkpoints.list_checkpoints(self.folder):
            other = checkpoints.step_of(path)
            is_wanted = other < step and other not in there and (is_kept(other) or not self.keep)
            if is_wanted and catch(checkpoints.verify, path, False, other not in self.saved)[0]:
                self.upload_step(other)
        store.put_changed(self.output, in_folders)
        status = read_json_object(self.output / "status.json")
        text = json.dumps({**status, "saved": step, "mirrored_step": step}) + "\n"
        store.write(f"{store.root}/status.json", text)
        if step:
            store.prune(step, self.keep, is_kept)
        return True

    def upload_step(self, step: int) -> dict | None:
        """Upload a checkpoint, or its manifest if that has got scores; return it, None if a newer
        one counts alone."""
        store, here = self.store, checkpoint_folder(self.folder, step)
        manifest = (here / MANIFEST).read_bytes()
        saved, name = json.loads(manifest), f"{here.name}-{store.word}"
        if store.manifests.get(step) == manifest:
            return saved
        if step not in store.manifests and store.find(step, manifest):  # of an earlier start
            store.manifests[step] = manifest
            return saved
        self.busy = step
        if any(self.ranks.nodes):
            store.write_owner(step)  # they upload it, too
        goes_on = lambda: not self.hurries or step == self.newest  # noqa: E731
        store.put_parts(name, here, goes_on)
        while store.lacks(name, saved["files"]):
            if not goes_on():
                return None
            if self.lost or not any(self.ranks.nodes):
                raise OSError(self.lost or f"{name} is not there as it was uploaded")
            time.sleep(1)  # another node uploads the rest
        store.put_manifest(step, name, manifest)
        return saved

    def follow(self) -> None:
        """Upload, on another node, what its processes have written of the step that the main one
        uploads."""
        while not self.taken:
            self.attempt(0, self.upload_parts)
            time.sleep(1)

    def upload_parts(self, _: int) -> bool:
        step = self.store.check_owner().get("step", 0)
        here = checkpoint_folder(self.folder, step)
        if step != self.followed and (here / MANIFEST).exists():
            self.busy = step
            self.store.put_parts(f"{here.name}-{self.store.word}", here, lambda: True)
            self.followed = step
        return True

    def say(self, text: str) -> None:
        """Print a line of the process that uploads: that of another node is not the main one."""
        if self.main:
            print_on_main(text)
        else:
            tqdm.write(text)
