"""Runs train_pipeline.py with the schedule pipedream and stores the gradients of its updates, or simulates them.

    record_gradients.py PROGRAMS FILE run OPTION...       in torchrun: FILE-RANK has the updates of the stage
    record_gradients.py PROGRAMS FILE simulate OPTION...  in one process: FILE has the updates of all stages

An update is the mean gradient over the replicas of the stage. In memory of the run, the largest number of versions of
the weights that a stage keeps.
"""

import importlib
import json
import os
import sys

import torch

programs, file, kind, *options = sys.argv[1:]
sys.path.insert(0, programs)
pipeline = importlib.import_module("train_pipeline")


def run() -> None:
    rank, updates, versions = int(os.environ["RANK"]), [], []
    share, forward = pipeline.Trainer.share_gradients, pipeline.RoundRobin._forward

    def recorded_share(self):
        share(self)
        updates.append([each.grad.clone() for each in self.part.parameters()])

    def recorded_forward(self, *words):
        forward(self, *words)
        stored = {next(iter(weights.values())).data_ptr() for _, _, _, weights in self.flying}
        versions.append((len(stored), len(self.flying)))

    pipeline.Trainer.share_gradients = recorded_share
    pipeline.RoundRobin._forward = recorded_forward
    pipeline.main(options)
    torch.save({"updates": updates, "versions": max(versions)}, f"{file}-{rank}")


def simulate() -> None:
    """Compute w(t+1) = w(t) - rate * gradient of f(w1(t-n+1), ..., wn(t)) for one micro-batch after the other."""
    arguments = pipeline.parser.parse_args(options)
    plan = json.loads(os.environ["PIPELINE_PLAN"])
    ranks, rate = plan["ranks"], arguments.learning_rate
    count = plan["micro_batches"] * max(map(len, ranks))
    torch.manual_seed(arguments.seed)
    model = pipeline.load_model(arguments.model)
    stages = [model[slice(*each)] for each in plan["stages"]]
    weights = [[[each.detach().clone() for each in stage.parameters()]] for stage in stages]
    # a stage with n replicas updates once for n micro-batches; `late`: updates that its forward pass does not see
    late = [-(-sum(map(len, ranks[at:])) // len(ranks[at])) - 1 for at in range(len(ranks))]
    pending = [[] for _ in stages]
    updates = [[] for _ in stages]
    data = pipeline.batches(arguments.input, arguments.classes, arguments.steps, "cpu", words=False)
    chunks = [
        pair
        for inputs, targets in data
        for pair in zip(inputs.chunk(count), targets.chunk(count), strict=True)
    ]
    for number, (value, target) in enumerate(chunks):
        used, begins, results = [], [], []
        for at, stage in enumerate(stages):
            version = max(0, number // len(ranks[at]) - late[at])
            used.append([each.clone().requires_grad_() for each in weights[at][version]])
            names = [name for name, _ in stage.named_parameters()]
            begins.append(value.detach().clone().requires_grad_())
            # layers may work in place
            value = torch.func.functional_call(
                stage, dict(zip(names, used[at], strict=True)), (begins[at].clone(),)
            )
            results.append(value)
        gradient = None
        results[-1] = torch.nn.functional.cross_entropy(results[-1], target)
        for at in reversed(range(len(stages))):
            results[at].backward(gradient)
            gradient = begins[at].grad
            pending[at].append([each.grad for each in used[at]])
            replicas = len(ranks[at])
            if len(pending[at]) == replicas:
                mean = [sum(each) / replicas for each in zip(*pending[at], strict=True)]
                pending[at] = []
                updates[at].append(mean)
                weights[at].append(
                    [old.add(new, alpha=-rate) for old, new in zip(weights[at][-1], mean, strict=True)]
                )
    torch.save(updates, file)


run() if kind == "run" else simulate()
