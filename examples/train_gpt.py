"""Trains a small byte-level GPT on the Python documentation that ships with Python, on one or several ranks.

    python examples/train_gpt.py --parallel none --losses none.json
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel overlap --against none.json --plot losses.png

`none` is torch.nn.Linear in one process, `serial` are tensor-parallel layers on the group's own collectives, `overlap`
the same layers with hidden exchanges. All start from the same weights, see the same batches and have the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT
from torch import Tensor, nn
from tqdm import tqdm

import streamoverlap as so

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them


def arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
        return int(text)

    title, _, notes = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=title, epilog=notes, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parallel", choices=["none", "serial", "overlap"], default="overlap", help="default: overlap")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU for every rank")
    add("--compile", action="store_true", help="torch.compile the model, forward and backward")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16 is by autocast")
    for name, value in {"steps": 200, "d-model": 128, "layers": 4, "heads": 8, "seq": 128, "batch": 8}.items():
        add(f"--{name}", type=positive, default=value, metavar="N", help=f"default: {value}")
    add("--lr", type=float, default=2e-3, help="AdamW's learning rate (default: 2e-3)")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--checkpoint", type=Path, metavar="DIR", help="save model, optimizer and losses here at the end")
    add("--save-every", type=positive, metavar="N", help="save every N steps, too")
    add("--resume", action="store_true", help="go on from the last checkpoint in DIR, which any number of ranks saved")
    add("--losses", type=Path, metavar="JSON", help="write the losses here")
    add("--plot", type=Path, metavar="PNG", help="draw the losses here")
    add("--against", type=Path, metavar="JSON", nargs="+", default=[], help="losses of other runs to compare and draw")
    args = parser.parse_args()

    if args.parallel == "none" and WORLD > 1:
        parser.error(f"--parallel none is for one process; found {WORLD} ranks")
    for name in ("heads", "seq"):
        if getattr(args, name) % WORLD:
            parser.error(f"--{name} is {getattr(args, name)}; expected a multiple of the {WORLD} ranks")
    if args.d_model % args.heads:
        parser.error(f"--d-model is {args.d_model}; expected a multiple of the {args.heads} heads")
    gpus, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device is None:
        args.device = "cuda" if gpus >= needed else "cpu"
    elif args.device == "cuda" and gpus < needed:
        parser.error(f"--device cuda needs a GPU for every rank; found {gpus} for {needed}")
    if args.checkpoint is None and (args.resume or args.save_every):
        parser.error("--resume and --save-every need --checkpoint DIR")
    if args.resume and not checkpoints(args.checkpoint):
        parser.error(f"--resume found no checkpoint in {args.checkpoint}")
    for path in args.against:
        if not path.is_file():
            parser.error(f"--against {path}: no such file")
    for path in filter(None, (args.losses, args.plot)):
        if not path.parent.is_dir():
            parser.error(f"{path}: no such folder")
    return args


def join_ranks(device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **alone)


def build(args: argparse.Namespace) -> GPT:
    """The model with this rank's slices of the weights, which depend on the seed alone."""
    column = row = nn.Linear
    if args.parallel != "none":
        plan = so.PlanSpec("serial") if args.parallel == "serial" else None
        column, row = partial(so.ColumnParallelLinear, plan=plan), partial(so.RowParallelLinear, plan=plan)
    torch.manual_seed(args.seed)
    # Drawn on the CPU, so that they are the same on all devices.
    return GPT(args.d_model, args.layers, args.heads, args.seq, column, row).to(args.device)


def batch(text: Tensor, step: int, args: argparse.Namespace) -> list[Tensor]:
    """Tokens, positions and targets of a step: this rank's rows of ``[seq, batch]``. A resumed run needs no history."""
    generator = torch.Generator().manual_seed(args.seed + 1_000_003 * step)
    starts = torch.randint(len(text) - args.seq, (args.batch,), generator=generator)
    positions = torch.arange(args.seq)[:, None]
    tokens, targets = text[starts + positions], text[starts + positions + 1]
    return [rows.chunk(WORLD)[RANK].to(args.device) for rows in (tokens, positions, targets)]


def checkpoints(folder: Path) -> list[Path]:
    """In the order of steps; ".metadata" is written last, so that a checkpoint that has one is whole."""
    return sorted(found.parent for found in folder.glob("step-*/.metadata"))


def train(model: GPT, args: argparse.Namespace) -> list[float]:
    """The loss of every step, from the first one on even if resumed."""
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    if len(text) <= args.seq:
        raise SystemExit(f"--seq is {args.seq}; the text has {len(text)} bytes")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses: list[float] = []
    if args.resume:
        state = {**so.sharded_state_dict(model, optimizer), "losses": losses}
        dcp.load(state, checkpoint_id=checkpoints(args.checkpoint)[-1])
        losses = state["losses"]
    if args.compile:
        model.compile(fullgraph=True)
    autocast = partial(torch.autocast, args.device, torch.bfloat16, enabled=args.dtype == "bfloat16")
    with tqdm(total=args.steps, initial=len(losses), desc=args.parallel, unit="step", disable=RANK > 0) as progress:
        while len(losses) < args.steps:
            with autocast():
                loss = model(*batch(text, len(losses), args)) / (args.seq * args.batch)  # this rank's part of the mean
            loss.backward()
            if args.parallel != "none":
                so.sync_sequence_parallel_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item())
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
            due = len(losses) == args.steps or (args.save_every and len(losses) % args.save_every == 0)
            if args.checkpoint and due:
                state = {**so.sharded_state_dict(model, optimizer), "losses": losses}
                dcp.save(state, checkpoint_id=args.checkpoint / f"step-{len(losses):06}")
    return losses


def report(losses: list[float], args: argparse.Namespace) -> None:
    name = f"{args.parallel}, W = {WORLD}" + (", compiled" if args.compile else "")
    if args.losses:
        args.losses.write_text(json.dumps({"name": name, "losses": losses}) + "\n")
    runs = {}
    print(f"{name}: loss {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {len(losses)}")
    for path in args.against:
        other = json.loads(path.read_text())
        runs[other["name"]] = other["losses"]
        pairs = list(zip(losses, other["losses"], strict=False))
        apart = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
        print(f"  differs from {other['name']} by {apart:.1e} at most in {len(pairs)} steps (relative)")
    runs[name] = losses
    if args.plot:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for number, (label, values) in enumerate(runs.items()):  # thinner and thinner: equal curves all show
            axes.plot(range(1, len(values) + 1), values, label=label, linewidth=2.0 * (len(runs) - number) - 1)
        axes.set(xlabel="step", ylabel="loss, nats per byte", title="Byte-level GPT on the Python documentation")
        axes.legend()
        figure.savefig(args.plot, dpi=150)


def main() -> None:
    args = arguments()
    join_ranks(args.device)
    losses = train(build(args), args)
    if RANK == 0:
        report(losses, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
