#!/usr/bin/env python3
"""Train a torch.nn.Sequential as a pipeline, divided as a Fairway plan says; a start for your own program.

    torchrun --nproc-per-node 2 train_pipeline.py --model models:resnet --input 64,3,224,224 --classes 1000

The plan is in the variable PIPELINE_PLAN: ``stages`` (first and last layer of each, the end excluded), ``ranks`` (of
each stage) and ``micro_batches`` (of each replica and step). Without it, each process has equally many layers.
Replace ``batches`` by your data. Without --model, a transformer learns which word of a text is the most frequent.
Needs torch 2.6 or newer.

With equally many replicas of all stages, pipeline p has the p-th rank of every stage, and
torch.distributed.pipelining runs each. Otherwise micro-batches go round the replicas of each stage, and the schedule
is GPipe. Weights are updated after all micro-batches of a step (GPipe, or 1F1B with a flush): losses are those of a
run without a pipeline. Rank 0 saves checkpoints of the whole model, from which any division can continue.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from common import newest_checkpoint, record_parameters, report, save, store_model
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WORDS, MAX_LENGTH = 64, 512


def shape(text):
    return [int(part) for part in text.split(",")]


parser = argparse.ArgumentParser(prog="train_pipeline.py", description=__doc__.splitlines()[0])
parser.add_argument("--model", default="", metavar="MODULE:ATTRIBUTE", help="default: a small transformer")
parser.add_argument(
    "--input", type=shape, default=[64, 32], metavar="N,...", help="N samples a step (all GPUs)"
)
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=0.05)
parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
parser.add_argument("--micro_batches", type=int, default=4, help="without a plan")
parser.add_argument(
    "--recompute",
    action="store_true",
    help="compute activations again in the backward pass, to save memory",
)
parser.add_argument("--save_every", type=int, default=20, help="steps between checkpoints")
parser.add_argument("--seed", type=int, default=0)


class Words(torch.nn.Module):
    """Words and their positions as vectors."""

    def __init__(self, width):
        super().__init__()
        self.word, self.place = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(MAX_LENGTH, width)

    def forward(self, text):
        return self.word(text) + self.place(torch.arange(text.shape[1], device=text.device))


class ClassifierHead(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.out = torch.nn.Linear(width, classes)

    def forward(self, x):
        return self.out(x.mean(1))


def example_model(classes, width=64, blocks=6):
    """Return a small transformer as a sequence of layers."""
    layer = torch.nn.TransformerEncoderLayer
    middle = [
        layer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(blocks)
    ]
    return torch.nn.Sequential(Words(width), *middle, ClassifierHead(width, classes))


def batches(shape, classes, steps, device, words):
    """Yield inputs and targets; equal in all processes. ``words``: texts, and the word that each has most often."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if words:
            targets = torch.randint(0, classes, (shape[0],), generator=draw)
            inputs = torch.randint(0, WORDS, shape, generator=draw)
            inputs = torch.where(torch.rand(shape, generator=draw) < 0.3, targets.unsqueeze(1), inputs)
        else:
            inputs = torch.rand(shape, generator=draw)
            targets = torch.randint(0, classes, (shape[0],), generator=draw)
        yield inputs.to(device), targets.to(device)


def main(words):
    arguments = parser.parse_args(words)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(arguments.seed)  # all processes begin with the same weights
    model = load_model(arguments.model) if arguments.model else example_model(arguments.classes)
    plan = read_plan(len(model), arguments.input[0], world, arguments.micro_batches)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    trainer = Trainer(model, plan, rank, device, arguments)
    if rank == 0:
        record_parameters(vars(arguments))
    first = trainer.load()
    done, began = 0, time.perf_counter()
    data = batches(arguments.input, arguments.classes, arguments.steps, device, words=not arguments.model)
    for step, (inputs, targets) in enumerate(data, 1):
        if step <= first:  # it was trained before the checkpoint
            continue
        loss = trainer.step(inputs, targets)
        done += len(inputs)
        if rank == 0:
            report_progress(first * len(inputs) + done)
            print(json.dumps({"step": step, "loss": loss}), flush=True)
            report(step, loss=loss)
        if step % arguments.save_every == 0 or step == arguments.steps:
            trainer.save(step)
    if rank == 0:
        store_model(newest_checkpoint())
    trainer.report(done, time.perf_counter() - began)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def load_model(name):
    import importlib

    sys.path.insert(0, os.getcwd())
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found() if not hasattr(found, "parameters") or isinstance(found, type) else found


def equal_plan(layers, world, micro_batches):
    """Return a plan with a stage of equally many layers for each process."""
    ends = [layers * (number + 1) // world for number in range(world)]
    stages = [list(each) for each in zip([0, *ends], ends)]
    parts = micro_batches if world > 1 else 1
    return {"stages": stages, "ranks": [[rank] for rank in range(world)], "micro_batches": parts}


def read_plan(layers, samples, world, micro_batches):
    """Return the plan of PIPELINE_PLAN, or an equal one; exit with a message where it does not fit the job."""
    text = os.environ.get("PIPELINE_PLAN", "")
    plan = json.loads(text) if text else equal_plan(layers, world, micro_batches)
    stages, ranks = plan["stages"], plan["ranks"]
    replicas = max(map(len, ranks))
    problem = ""
    if sorted(rank for each in ranks for rank in each) != list(range(world)):
        problem = "it is for %d processes, and there are %d" % (sum(map(len, ranks)), world)
    elif any(first >= end for first, end in stages):
        problem = "there are %d processes for %d layers" % (world, layers)
    elif stages[0][0] != 0 or stages[-1][1] != layers:
        problem = "it is for %d layers, and the model has %d" % (stages[-1][1], layers)
    elif samples % (replicas * plan["micro_batches"]):
        problem = "%d samples are not divisible by %d replicas x %d micro-batches" % (
            samples, replicas, plan["micro_batches"],
        )  # fmt: skip
    if problem:
        sys.exit("train_pipeline.py: the plan does not fit: " + problem)
    return plan


class Recomputed(torch.nn.Module):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs):
        return checkpoint(self.layers, inputs, use_reentrant=False)


class BusyTime:
    """Adds up the time in which this process computes; the rest of a step it waits or communicates."""

    def __init__(self):
        self.s, self.events = 0.0, []

    def measured(self, function):
        def run(*words, **named):
            if torch.cuda.is_available():  # the GPU works later than the call
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                result = function(*words, **named)
                events[1].record()
                self.events.append(events)
                return result
            begin = time.perf_counter()
            result = function(*words, **named)
            self.s += time.perf_counter() - begin
            return result

        return run

    def take(self):
        """Return the seconds since the last call; the GPU has finished."""
        taken = self.s + sum(begin.elapsed_time(end) for begin, end in self.events) / 1000
        self.s, self.events = 0.0, []
        return taken


class RoundRobin:
    """GPipe over stages with different numbers of replicas: replica r of n computes micro-batches r, r + n, ..."""

    def __init__(self, model, part, stage, trainer):
        self.part, self.stage, self.ranks = part, stage, trainer.ranks
        self.count, self.loss, self.device = trainer.total, trainer.loss, trainer.device
        self.mine = range(trainer.replica, self.count, len(self.ranks[stage]))
        self.before = model[: trainer.stages[stage][0]]
        self.forward_one_chunk, self.backward_one_chunk = part, torch.autograd.backward
        self.shape = None

    def _peer(self, stage, number):
        return self.ranks[stage][number % len(self.ranks[stage])]

    def _input_shape(self, inputs):
        """Return the shape and type of what the stage before sends; found by computing it once."""
        if self.shape is None:
            with torch.no_grad():
                example = self.before.cpu().eval()(inputs[: len(inputs) // self.count].cpu())
            self.shape = example.shape, example.dtype
        return self.shape

    def step(self, inputs, targets, losses):
        sent, done = [], []
        some, wanted = inputs.chunk(self.count), targets.chunk(self.count)
        last = len(self.ranks) - 1
        for number in self.mine:
            given = some[number]
            if self.stage:
                shape, kind = self._input_shape(inputs)
                given = torch.empty(shape, dtype=kind, device=self.device)
                dist.recv(given, self._peer(self.stage - 1, number))
                given.requires_grad_(given.is_floating_point())
            result = self.forward_one_chunk(
                given.clone() if self.stage else given
            )  # layers may work in place
            if self.stage == last:
                result = self.loss(result, wanted[number])
                losses.append(result.detach())
                result = result / self.count
            else:
                sent.append(dist.isend(result.detach().contiguous(), self._peer(self.stage + 1, number)))
            done.append((given, result))
        for number, (given, result) in zip(self.mine, done):
            gradient = None
            if self.stage < last:
                gradient = torch.empty_like(result)
                dist.recv(gradient, self._peer(self.stage + 1, number))
            self.backward_one_chunk(result, gradient)
            if self.stage:
                sent.append(dist.isend(given.grad.contiguous(), self._peer(self.stage - 1, number)))
        for each in sent:
            each.wait()


class Trainer:
    """Trains the stage of this process; the replicas of a stage share their gradients after each step."""

    def __init__(self, model, plan, rank, device, arguments):
        self.stages, self.ranks, self.micro_batches = plan["stages"], plan["ranks"], plan["micro_batches"]
        ranks = self.ranks
        self.stage = next(number for number, each in enumerate(ranks) if rank in each)
        self.replica = ranks[self.stage].index(rank)
        self.replicas = len(ranks[self.stage])
        self.equal = all(len(each) == self.replicas for each in ranks)
        self.total = self.micro_batches * max(map(len, ranks))
        self.is_last = self.stage == len(self.stages) - 1
        self.loss, self.device = torch.nn.functional.cross_entropy, device
        self.part = model[slice(*self.stages[self.stage])].to(device)
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=arguments.learning_rate)
        part = Recomputed(self.part) if arguments.recompute else self.part
        self.forward, self.twins, self.schedule = part, None, None
        # every process makes all groups, in the same order
        self.everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None
        groups = [dist.new_group(each) if len(each) > 1 else None for each in ranks]
        self.twins = groups[self.stage]
        self.busy, chunks = BusyTime(), None
        if not self.equal:
            self.schedule = chunks = RoundRobin(model, part, self.stage, self)
        elif len(self.stages) > 1:
            groups = [dist.new_group([each[number] for each in ranks]) for number in range(self.replicas)]
            chunks = PipelineStage(part, self.stage, len(self.stages), device, group=groups[self.replica])
            self.schedule = SCHEDULES[arguments.schedule](chunks, self.micro_batches, loss_fn=self.loss)
        if chunks is not None:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                setattr(chunks, name, self.busy.measured(getattr(chunks, name)))
        self.step_s, self.busy_s = [], []

    def step(self, inputs, targets):
        """Train one step and return the mean loss."""
        if self.equal:
            share = len(inputs) // self.replicas
            mine = slice(self.replica * share, (self.replica + 1) * share)
            inputs, targets = inputs[mine], targets[mine]
        self.optimizer.zero_grad()
        losses = []
        begin = time.perf_counter()
        if self.schedule is None:
            for some, wanted in zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches)):
                loss = self.loss(self.forward(some), wanted)
                (loss / self.micro_batches).backward()
                losses.append(loss.detach())
        elif not self.equal:
            self.schedule.step(inputs, targets, losses)
        elif self.stage == 0:
            self.schedule.step(inputs, **({"target": targets, "losses": losses} if self.is_last else {}))
        elif self.is_last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step_s.append(time.perf_counter() - begin)
        self.busy_s.append(self.busy.take())
        if self.twins is not None:
            for each in self.part.parameters():
                dist.all_reduce(each.grad, group=self.twins)
                each.grad /= self.replicas if self.equal else 1
        self.optimizer.step()
        mean = torch.zeros(1, dtype=torch.float64)
        if self.is_last:
            mean += torch.stack([loss.detach() for loss in losses]).sum().item() / self.total
        if self.everyone is not None:
            dist.all_reduce(mean, group=self.everyone)
        return float(mean)

    def save(self, step):
        """Save the layers of all stages in one file; a stage names them as the whole model does."""
        mine = {name: value.cpu() for name, value in self.part.state_dict().items()}
        parts = [mine]
        if self.everyone is not None:
            parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(mine if self.replica == 0 else {}, parts, group=self.everyone)
        if parts is not None:
            model = {name: value for part in parts for name, value in part.items()}
            save(step, lambda path: torch.save({"step": step, "model": model}, path))

    def load(self):
        """Load the newest checkpoint, which rank 0 reads; return its step, 0 without one."""
        path = newest_checkpoint() if self.everyone is None or dist.get_rank() == 0 else None
        states = [torch.load(path, map_location="cpu") if path else None]
        if self.everyone is not None:
            dist.broadcast_object_list(states, group=self.everyone)
        if states[0] is None:
            return 0
        if self.everyone is None or dist.get_rank() == 0:
            print("continues after step %d" % states[0]["step"], file=sys.stderr, flush=True)
        names = self.part.state_dict()
        self.part.load_state_dict({name: states[0]["model"][name] for name in names})
        return states[0]["step"]

    def report(self, samples, seconds):
        """Print the rate, and the measured bubble next to the prediction."""
        line = {"samples_per_s": samples / seconds}
        count = len(self.stages)
        if self.schedule is not None and self.step_s:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, list(zip(self.step_s, self.busy_s)))
            # the fastest step, which other processes of the machine disturbed least
            step_s, busy_s = min((max(each)[0], sum(busy for _, busy in each)) for each in zip(*everyone))
            line["step_s"] = step_s
            # a step of equal stages takes M + K - 1 times, of which each stage computes M
            line["bubble_predicted"] = (count - 1) / (self.micro_batches + count - 1)
            line["bubble_measured"] = 1 - busy_s / len(everyone) / step_s
        if self.is_last and self.replica == 0:
            print(json.dumps(line), flush=True)


def report_progress(samples):
    """Tell Fairway how many samples are done, for the measured rate of the job."""
    path = os.environ.get("FAIRWAY_PROGRESS_FILE")
    if path:
        with open(path, "w") as file:
            file.write(str(samples))


if __name__ == "__main__":
    main(sys.argv[1:])
