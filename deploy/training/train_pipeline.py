#!/usr/bin/env python3
"""Train a torch.nn.Sequential as a pipeline, divided as a Fairway plan says; a start for your own program.

    torchrun --nproc-per-node 2 train_pipeline.py --model models:resnet --input 64,3,224,224 --classes 1000

The plan is in the variable PIPELINE_PLAN: ``stages`` (first and last layer of each, the end excluded), ``ranks`` (of
each stage) and ``micro_batches`` (of each replica and step). Without it, each process has equally many layers.
Replace ``batches`` by your data. Without --model, a transformer learns which word of a text is the most frequent.
Needs torch 2.6 or newer.

With the schedules gpipe and 1f1b, weights are updated after all micro-batches of a step, when the pipeline is empty:
losses are those of a run without a pipeline. With equally many replicas of all stages, pipeline p has the p-th rank
of every stage, and torch.distributed.pipelining runs each. Otherwise micro-batches are dealt round the replicas of
each stage.

The schedule pipedream never empties the pipeline. A stage updates its weights after the backward pass of each
micro-batch (of each of its replicas), and keeps the weights of every micro-batch in flight for its backward pass
(weight stashing). With n stages, the weights of stage s change by
w(t+1) = w(t) - rate * gradient of f(w1(t-n+1), w2(t-n+2), ..., wn(t))   (Narayanan et al., SOSP 2019, section 3.3).

Rank 0 saves checkpoints of the whole model, from which any division can continue; pipedream finishes before what is
in flight.
"""

import argparse
import collections
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from common import newest_checkpoint, record_parameters, report, save, store_model
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "pipedream": None}
WORDS, MAX_LENGTH = 64, 512
STEPS_KEPT = 100  # for the measured bubble


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
parser.add_argument("--schedule", choices=sorted(SCHEDULES), help="default: that of the plan, or 1f1b")
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
    plan = read_plan(len(model), world, arguments)
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
        trainer.step(inputs, targets)
        done += len(inputs)
        if rank == 0:
            report_progress(first * len(inputs) + done)
        saves = step % arguments.save_every == 0 or step == arguments.steps
        if saves:
            trainer.finish()
        if saves or trainer.flushes:  # the processes of pipedream do not wait for each other in between
            losses = trainer.take_losses()
            for number, loss in enumerate(losses, step - len(losses) + 1) if rank == 0 else ():
                print(json.dumps({"step": number, "loss": loss}), flush=True)
                report(number, loss=loss)
        if saves:
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


def read_plan(layers, world, arguments):
    """Return the plan of PIPELINE_PLAN, or an equal one; exit with a message where it does not fit the job."""
    text = os.environ.get("PIPELINE_PLAN", "")
    plan = json.loads(text) if text else equal_plan(layers, world, arguments.micro_batches)
    plan["schedule"] = arguments.schedule or plan.get("schedule", "1f1b")
    stages, ranks, samples = plan["stages"], plan["ranks"], arguments.input[0]
    replicas = max(map(len, ranks))
    total = replicas * plan["micro_batches"]
    problem = ""
    if sorted(rank for each in ranks for rank in each) != list(range(world)):
        problem = "it is for %d processes, and there are %d" % (sum(map(len, ranks)), world)
    elif any(first >= end for first, end in stages):
        problem = "there are %d processes for %d layers" % (world, layers)
    elif stages[0][0] != 0 or stages[-1][1] != layers:
        problem = "it is for %d layers, and the model has %d" % (stages[-1][1], layers)
    elif samples % total:
        problem = "%d samples are not divisible by %d replicas x %d micro-batches" % (
            samples, replicas, plan["micro_batches"],
        )  # fmt: skip
    elif plan["schedule"] not in SCHEDULES:
        problem = "there is no schedule %r" % plan["schedule"]
    elif plan["schedule"] == "pipedream" and any(total % len(each) for each in ranks):
        problem = "the replicas of a stage do not divide %d micro-batches, as pipedream needs" % total
    if problem:
        sys.exit("train_pipeline.py: the plan does not fit: " + problem)
    return plan


class StageModule(torch.nn.Module):
    """The layers of a stage; with ``recompute``, their activations are computed again in the backward pass."""

    def __init__(self, layers, recompute):
        super().__init__()
        self.layers, self.recompute = layers, recompute

    def forward(self, inputs):
        inputs = inputs.clone()  # layers may work in place
        return checkpoint(self.layers, inputs, use_reentrant=False) if self.recompute else self.layers(inputs)


class ChunkTimes:
    """The times of the passes that this process computes; the rest of a step it waits or communicates."""

    def __init__(self):
        self.chunks, self.cpu_s = [], 0.0

    def measured(self, kind, function):
        """Return the function, measured; its first argument is the number of the micro-batch."""

        def run(number, *words, **named):
            if torch.cuda.is_available():  # the GPU works later than the call
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                result = function(number, *words, **named)
                events[1].record()
                self.chunks.append((kind, number, events))
                return result
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            result = function(number, *words, **named)
            self.chunks.append((kind, number, time.perf_counter() - begin))
            self.cpu_s += time.thread_time() - cpu_begin
            return result

        return run

    def take(self, prefix):
        """Return kind, micro-batch and seconds of the passes since the last call, and their CPU time in all.

        The GPU has finished.
        """
        taken = (
            [
                (kind, (*prefix, number), s if isinstance(s, float) else s[0].elapsed_time(s[1]) / 1000)
                for kind, number, s in self.chunks
            ],
            self.cpu_s,
        )
        self.chunks, self.cpu_s = [], 0.0
        return taken


def replayed_step_s(processes):
    """Return the length of each step if transfers took no time; the first stage begins and ends it.

    ``processes`` lists for each its stage and, by step, the passes that it computed in their order: kind, micro-batch
    (unique in all steps) and seconds.
    """
    done, clocks = {}, [0.0] * len(processes)
    known = {
        (kind, stage, number) for stage, steps in processes for each in steps for kind, number, _ in each
    }
    left = [
        collections.deque((at, *each) for at, step in enumerate(steps) for each in step)
        for _, steps in processes
    ]
    ends = [[0.0] * len(steps) for _, steps in processes]
    while any(left):
        for process, (stage, _) in enumerate(processes):
            while left[process]:
                step, kind, number, seconds = left[process][0]
                # the pass of the stage before or after; there is none for the first and last stage, and for updates
                after = {"forward": -1, "backward": 1}.get(kind, len(processes))
                needs = (kind, stage + after, number)
                if needs in known and needs not in done:
                    break
                left[process].popleft()
                clocks[process] = max(clocks[process], done.get(needs, 0.0)) + seconds
                done[kind, stage, number] = ends[process][step] = clocks[process]
    first = [max(each) for each in zip(*(ends[at] for at, (stage, _) in enumerate(processes) if stage == 0))]
    return [end - begin for begin, end in zip([0.0, *first], first)]


class RoundRobin:
    """A schedule in which replica r of n computes micro-batches r, r + n, ... of each step.

    At most ``window`` of them are in flight, as many as keep all GPUs of a pipeline with 1F1B busy. With pipedream,
    they stay in flight after the step, and the weights are updated after each.
    """

    def __init__(self, model, plan, trainer, recompute):
        self.part, self.stage, self.ranks = trainer.part, trainer.stage, trainer.ranks
        self.count, self.loss, self.device = trainer.total, trainer.loss, trainer.device
        self.trainer, self.recompute, self.first = trainer, recompute, 0
        after, replicas = sum(map(len, self.ranks[self.stage :])), len(self.ranks[self.stage])
        self.mine = range(trainer.replica, self.count, replicas)
        self.flushes = plan["schedule"] != "pipedream"
        self.window = len(self.mine) if plan["schedule"] == "gpipe" else -(-after // replicas)
        self.before = model[: trainer.stages[self.stage][0]]
        self.weights = dict(self.part.named_parameters()) if self.flushes else self._current_weights()
        self.shape, self.flying, self.sent = None, collections.deque(), []
        # groups of their own: a GPU does not wait with gradients for activations to arrive, nor with these for those
        self.groups = [dist.new_group() for _ in range(2)] if dist.is_initialized() else [None, None]

    def _current_weights(self):
        """Return the weights as leaves of a graph, which stay when the parameters get a new storage."""
        return {
            name: each.data.requires_grad_(each.requires_grad) for name, each in self.part.named_parameters()
        }

    def _peer(self, stage, number):
        return self.ranks[stage][number % len(self.ranks[stage])]

    def _input_shape(self, samples):
        """Return the shape and type of what the stage before sends; found by computing it once."""
        if self.shape is None:
            with torch.no_grad():
                example = self.before.cpu().eval()(samples.cpu())
            self.shape = example.shape, example.dtype
        return self.shape

    def step(self, inputs, targets, losses):
        some, wanted = inputs.chunk(self.count), targets.chunk(self.count)
        for number in self.mine:
            self._forward(self.first + number, some[number], wanted[number], losses)
            if len(self.flying) == self.window:
                self._backward()
        if self.flushes:
            self.flush()
        else:
            self.first += self.count

    def flush(self):
        while self.flying:
            self._backward()
        for each in self.sent:
            each.wait()
        self.sent = []

    def _forward(self, number, given, wanted, losses):
        if self.stage:
            shape, kind = self._input_shape(given)
            given = torch.empty(shape, dtype=kind, device=self.device)
            dist.recv(given, self._peer(self.stage - 1, number), group=self.groups[0])
            given.requires_grad_(given.is_floating_point())
        result = self.forward_one_chunk(number, given)
        if self.stage == len(self.ranks) - 1:
            result = self.loss(result, wanted)
            losses.append(result.detach())
            result = result / self.count if self.flushes else result
        else:
            self._send(result.detach(), self._peer(self.stage + 1, number), self.groups[0])
        self.flying.append((number, given, result, self.weights))

    def _backward(self):
        number, given, result, weights = self.flying.popleft()
        gradient = None
        if self.stage < len(self.ranks) - 1:
            gradient = torch.empty_like(result)
            dist.recv(gradient, self._peer(self.stage + 1, number), group=self.groups[1])
        self.backward_one_chunk(number, result, gradient)
        if self.stage:
            self._send(given.grad, self._peer(self.stage - 1, number), self.groups[1])
        if not self.flushes:
            for name, each in self.part.named_parameters():
                each.grad, weights[name].grad = weights[name].grad, None
            self.trainer.share_gradients()
            self.update_weights(number)

    def _send(self, tensor, rank, group):
        self.sent = [each for each in self.sent if not each.is_completed()]
        self.sent.append(dist.isend(tensor.contiguous(), rank, group=group))

    def forward_one_chunk(self, number, given):
        given = given.clone() if self.stage else given  # layers may work in place
        if self.recompute:
            return checkpoint(functional_call, self.part, self.weights, (given,), use_reentrant=False)
        return functional_call(self.part, self.weights, (given,))

    def backward_one_chunk(self, number, result, gradient):
        if result.requires_grad:  # not in a first stage without weights
            torch.autograd.backward(result, gradient)

    def update_weights(self, number):
        if self.flying:  # the newest one needs the weights of its forward pass, which are the newest, too
            for each in self.part.parameters():
                each.data = each.data.clone()
        self.trainer.optimizer.step()
        self.weights = self._current_weights()


class Trainer:
    """Trains the stage of this process; the replicas of a stage share their gradients before each update."""

    def __init__(self, model, plan, rank, device, arguments):
        self.stages, self.ranks, self.micro_batches = plan["stages"], plan["ranks"], plan["micro_batches"]
        ranks = self.ranks
        self.stage = next(number for number, each in enumerate(ranks) if rank in each)
        self.replica = ranks[self.stage].index(rank)
        self.replicas = len(ranks[self.stage])
        self.flushes = plan["schedule"] != "pipedream"
        self.in_turn = not self.flushes or any(len(each) != self.replicas for each in ranks)
        self.total = self.micro_batches * max(map(len, ranks))
        self.is_last = self.stage == len(self.stages) - 1
        self.loss, self.device = torch.nn.functional.cross_entropy, device
        self.part = model[slice(*self.stages[self.stage])].to(device)
        weights = {"params": list(self.part.parameters())}  # a stage may have none
        self.optimizer = torch.optim.SGD([weights], lr=arguments.learning_rate)
        self.forward = StageModule(self.part, arguments.recompute)
        # every process makes all groups, in the same order
        self.everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None
        groups = [dist.new_group(each) if len(each) > 1 else None for each in ranks]
        self.twins = groups[self.stage]
        self.times, self.schedule, chunks = ChunkTimes(), None, None
        if self.in_turn:
            self.schedule = chunks = RoundRobin(model, plan, self, arguments.recompute)
            chunks.update_weights = self.times.measured("update", chunks.update_weights)
        elif len(self.stages) > 1:
            groups = [dist.new_group([each[number] for each in ranks]) for number in range(self.replicas)]
            chunks = PipelineStage(
                self.forward, self.stage, len(self.stages), device, group=groups[self.replica]
            )
            self.schedule = SCHEDULES[plan["schedule"]](chunks, self.micro_batches, loss_fn=self.loss)
        if chunks is not None:
            for kind in ("forward", "backward"):
                name = kind + "_one_chunk"
                setattr(chunks, name, self.times.measured(kind, getattr(chunks, name)))
        self.losses = []
        self.done, self.steps = 0, collections.deque(maxlen=STEPS_KEPT)

    def share_gradients(self):
        """Average the gradients over the replicas of the stage."""
        if self.twins is not None:
            # the losses of micro-batches dealt round are divided by the number of all
            divisor = 1 if self.in_turn and self.flushes else self.replicas
            for gradient in [each.grad for each in self.part.parameters() if each.grad is not None]:
                dist.all_reduce(gradient, group=self.twins)
                gradient /= divisor

    def step(self, inputs, targets):
        """Train one step."""
        if not self.in_turn:
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
        elif self.in_turn:
            self.schedule.step(inputs, targets, losses)
        elif self.stage == 0:
            self.schedule.step(inputs, **({"target": targets, "losses": losses} if self.is_last else {}))
        elif self.is_last:
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        # micro-batches are numbered by step, and by pipeline of torch
        prefix = (self.done if self.flushes else 0, 0 if self.in_turn else self.replica)
        self.steps.append((time.perf_counter() - begin, *self.times.take(prefix)))
        self.done += 1
        if self.flushes:
            self.share_gradients()
            self.optimizer.step()
        mine = torch.stack(losses).sum().item() / self.total if self.is_last else 0.0
        self.losses.append(mine)

    def take_losses(self):
        """Return the mean losses of the steps since the last call; the processes wait for each other."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        self.losses = []
        if self.everyone is not None:
            dist.all_reduce(losses, group=self.everyone)
        return losses.tolist()

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

    def finish(self):
        """Compute the backward passes of the micro-batches that are still in flight."""
        if not self.flushes:
            self.schedule.flush()

    def report(self, samples, seconds):
        """Print the rate, and the measured bubble next to the prediction."""
        line = {"samples_per_s": samples / seconds}
        count = len(self.stages)
        if count > 1 and self.steps:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (self.stage, list(self.steps)))
            replayed = replayed_step_s([(stage, [each[1] for each in steps]) for stage, steps in everyone])
            # the fastest step, which other processes of the machine disturbed least; the first one fills the pipeline
            steps = list(zip(*(steps for _, steps in everyone)))
            first = [at for at, (stage, _) in enumerate(everyone) if stage == 0]
            lengths = [max(each[process][0] for process in first) for each in steps]
            step_s, at = min((s, at) for at, s in enumerate(lengths) if at or len(steps) == 1)
            busy_s = [sum(each[2] for each in chunks) for _, chunks, _ in steps[at]]
            # a step of equal stages takes M + K - 1 times, of which each stage computes M
            flushed = (count - 1) / (self.micro_batches + count - 1)
            mean_busy_s = sum(busy_s) / len(busy_s)
            line["step_s"] = step_s
            line["bubble_predicted"] = flushed if self.flushes else 0.0
            line["bubble_measured"] = max(0.0, 1 - mean_busy_s / replayed[at])
            line["communication_measured"] = max(0.0, 1 - replayed[at] / step_s)
            line["idle_measured"] = 1 - mean_busy_s / step_s
            if not torch.cuda.is_available():
                line["cpu_share"] = min(cpu_s / busy for busy, (_, _, cpu_s) in zip(busy_s, steps[at]))
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
