"""A script of one's own whose run lives in a mirror: its weights in one SHA-256 at the end."""

import argparse
import hashlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from samestep import Training

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--mirror", default="")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--max_steps", type=int, default=24)
parser.add_argument("--save_every", type=int, default=3)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--learning_rate", type=float, default=1e-2)
parser.add_argument("--grace", type=int, default=25)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--best", action="store_true")
args = parser.parse_args()

set_seed(3)
if args.fsdp:
    from samestep import send_weights
accelerator = Accelerator(cpu=not args.fsdp)
width = args.width
layers = [torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
rows = [{"x": x, "y": x.sum().sin()} for x in inputs]
if args.fsdp:
    send_weights(accelerator, model)
model, optimizer = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
)
training = Training(
    accelerator, model, optimizer, rows, folder=args.folder, seed=5, global_batch_size=8,
    micro_batch_size=2, exact=True, settings={"learning_rate": args.learning_rate},
    keep_checkpoints=2, mirror=args.mirror, mirror_grace=args.grace,
)  # fmt: skip
for step in training.steps(args.max_steps, save_every=args.save_every):
    for batch in step:
        with accelerator.accumulate(model):
            step.backward(lambda: ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum())
    step.clip(1.0)
    optimizer.step()
    if args.best and step.due(args.save_every):
        training.save()
        training.score({"eval_loss": abs(step.number - 7.0)})
    time.sleep(args.seconds)
if args.best:
    print(f"best is step {training.load_best()}")
digest = hashlib.sha256()
for name, values in sorted(accelerator.get_state_dict(model).items()):
    digest.update(name.encode() + values.cpu().numpy().tobytes())
if accelerator.is_main_process:
    with open(f"{args.folder}/notes.txt", "w") as file:
        file.write(digest.hexdigest())
if not training.mirror.upload():
    print("the notes are here alone")
accelerator.print("SHA", digest.hexdigest())
