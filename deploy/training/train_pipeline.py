#!/usr/bin/env python3
"""Train a torch.nn.Sequential as a pipeline, divided as a Fairway plan says; a start for your own program.

    torchrun --nproc-per-node 2 train_pipeline.py --model models:resnet --input 64,3,224,224 --classes 1000

The plan is in the variable PIPELINE_PLAN: ``stages`` (first and last layer of each, the end excluded), ``ranks`` (of
each stage; equally many: pipeline p has the p-th rank of every stage) and ``micro_batches``. Without it, the whole
model is trained in one process. Replace ``batches`` by your data. Needs torch 2.6 or newer.

Weights are updated after all micro-batches of a step (GPipe, or 1F1B with a flush): losses are those of a run
without a pipeline.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def example_model():
    """Return a small network of equal layers."""
    layers = []
    for _ in range(8):
        layers += [torch.nn.Linear(256, 256), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))


def batches(shape, classes, steps, device):
    """Yield inputs and targets; equal in all processes."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.rand(shape, generator=draw)
        targets = torch.randint(0, classes, (shape[0],), generator=draw)
        yield inputs.to(device), targets.to(device)


def main(words):
    arguments = parse(words)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.manual_seed(arguments.seed)  # all processes begin with the same weights
    model = load_model(arguments.model)
    plan = read_plan(len(model), arguments.input[0], world)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    trainer = Trainer(model, plan, rank, device, arguments)
    done, began, shape = 0, time.perf_counter(), arguments.input
    for step, (inputs, targets) in enumerate(batches(shape, arguments.classes, arguments.steps, device)):
        loss = trainer.step(inputs, targets)
        done += shape[0]
        if rank == 0:
            report_progress(done)
        if loss is not None:
            print(json.dumps({"step": step + 1, "loss": loss}), flush=True)
    trainer.report(done, time.perf_counter() - began)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def parse(words):
    parser = argparse.ArgumentParser(prog="train_pipeline.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", metavar="MODULE:ATTRIBUTE", help="default: a small example")
    shape = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument(
        "--input", type=shape, default=[64, 256], metavar="N,...", help="N samples a step (all GPUs)"
    )
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def load_model(name):
    if not name:
        return example_model()
    import importlib

    sys.path.insert(0, os.getcwd())
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found() if not hasattr(found, "parameters") or isinstance(found, type) else found


def read_plan(layers, samples, world):
    """Return the plan of PIPELINE_PLAN, or exit with a message where it does not fit the job."""
    text = os.environ.get("PIPELINE_PLAN", "")
    plan = json.loads(text) if text else {"stages": [[0, layers]], "ranks": [[0]], "micro_batches": 1}
    stages, ranks = plan["stages"], plan["ranks"]
    replicas = len(ranks[0])
    problem = ""
    if any(len(each) != replicas for each in ranks):
        problem = "its stages have unequal replicas; torch pipelining needs equally many"
    elif sorted(rank for each in ranks for rank in each) != list(range(world)):
        problem = "it is for %d processes, and there are %d" % (sum(map(len, ranks)), world)
    elif stages[0][0] != 0 or stages[-1][1] != layers:
        problem = "it is for %d layers, and the model has %d" % (stages[-1][1], layers)
    elif samples % (replicas * plan["micro_batches"]):
        problem = "%d samples are not divisible by %d replicas x %d micro-batches" % (
            samples, replicas, plan["micro_batches"],
        )  # fmt: skip
    if problem:
        sys.exit("train_pipeline.py: the plan does not fit: " + problem)
    return plan


class Trainer:
    """Trains the stage of this process; the replicas of a stage share their gradients after each step."""

    def __init__(self, model, plan, rank, device, arguments):
        self.stages, ranks, self.micro_batches = plan["stages"], plan["ranks"], plan["micro_batches"]
        self.stage = next(number for number, each in enumerate(ranks) if rank in each)
        self.pipeline = ranks[self.stage].index(rank)
        self.replicas = len(ranks[0])
        self.is_last = self.stage == len(self.stages) - 1
        self.loss = torch.nn.functional.cross_entropy
        self.part = model[slice(*self.stages[self.stage])].to(device)
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=arguments.learning_rate)
        self.twins = self.schedule = None
        if self.replicas > 1:
            groups = [
                dist.new_group(each) for each in ranks
            ]  # every process makes all groups, in the same order
            self.twins = groups[self.stage]
        if len(self.stages) > 1:
            groups = [dist.new_group([each[number] for each in ranks]) for number in range(self.replicas)]
            stage = PipelineStage(
                self.part, self.stage, len(self.stages), device, group=groups[self.pipeline]
            )
            self.schedule = SCHEDULES[arguments.schedule](stage, self.micro_batches, loss_fn=self.loss)
        self.step_s, self.received, self.wanted = [], None, None
        self.part.register_forward_pre_hook(self._remember)

    def _remember(self, module, inputs):
        self.received = inputs[0].detach()

    def step(self, inputs, targets):
        """Train one step; return the mean loss in the first process of the last stage, else None."""
        share = len(inputs) // self.replicas
        mine = slice(self.pipeline * share, (self.pipeline + 1) * share)
        inputs, targets = inputs[mine], targets[mine]
        self.wanted = targets[: len(targets) // self.micro_batches]
        self.optimizer.zero_grad()
        losses = []
        begin = time.perf_counter()
        if self.schedule is None:
            for some, wanted in zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches)):
                loss = self.loss(self.part(some), wanted)
                (loss / self.micro_batches).backward()
                losses.append(loss.detach())
        elif self.stage == 0:
            self.schedule.step(inputs, **({"target": targets, "losses": losses} if self.is_last else {}))
        elif self.is_last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        self._synchronize()
        self.step_s.append(time.perf_counter() - begin)
        if self.twins is not None:
            for each in self.part.parameters():
                dist.all_reduce(each.grad, group=self.twins)
                each.grad /= self.replicas
        self.optimizer.step()
        if not self.is_last:
            return None
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        if self.twins is not None:
            dist.all_reduce(mean, group=self.twins)
            mean /= self.replicas
        return float(mean) if self.pipeline == 0 else None

    def _synchronize(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def report(self, samples, seconds):
        """Print the rate, and the measured bubble next to the prediction."""
        if not self.is_last or self.pipeline:
            return
        line = {"samples_per_s": samples / seconds}
        count = len(self.stages)
        if count > 1:
            ordered = sorted(self.step_s[1:] or self.step_s)
            # a step of equal stages takes M + K - 1 times, one takes M
            line["step_s"] = ordered[len(ordered) // 2]
            line["bubble_predicted"] = (count - 1) / (self.micro_batches + count - 1)
            line["bubble_measured"] = 1 - self._alone_s() / line["step_s"]
        print(json.dumps(line), flush=True)

    def _alone_s(self):
        """Return the time in which this stage computes all micro-batches of a step without waiting."""
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(self.micro_batches):
                given = self.received.detach().requires_grad_(self.received.is_floating_point())
                self.loss(self.part(given), self.wanted).backward()
            self._synchronize()
            times.append(time.perf_counter() - begin)
        return sorted(times)[2]


def report_progress(samples):
    """Tell Fairway how many samples are done, for the measured rate of the job."""
    path = os.environ.get("FAIRWAY_PROGRESS_FILE")
    if path:
        with open(path, "w") as file:
            file.write(str(samples))


if __name__ == "__main__":
    main(sys.argv[1:])
