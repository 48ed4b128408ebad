#!/usr/bin/env python3
"""Measure the layers of a torch.nn.Sequential and write a layer profile (docs/pipeline-plans.md).

    python profile_layers.py models:resnet --input 64,3,224,224 --output profile.json

In a job with the variable LAYER_PROFILE and ``--output -``, Fairway stores the result under that name.

``models:resnet`` is the module and attribute: a Sequential, or a function that returns one. Each of its children
is a layer. Runs in the job's image; needs Python 3.8 and torch, and measures on one GPU if there is one.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time


def main(words):
    arguments = _parse(words)
    import torch

    try:
        model = load_model(arguments.model)
        if not isinstance(model, torch.nn.Sequential):
            raise ValueError("it is a %s, not a torch.nn.Sequential" % type(model).__name__)
        if not len(model):
            raise ValueError("it has no layers")
    except Exception as error:
        sys.exit("profile_layers.py: cannot load %s: %s" % (arguments.model, error))
    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if arguments.integers:
        example = torch.randint(0, arguments.integers, arguments.input, device=device)
    else:
        example = torch.rand(arguments.input, device=device)
    try:
        nodes = measure(model.to(device).train(), example, arguments.steps)
    except RuntimeError as error:
        sys.exit("profile_layers.py: %s does not run on the input: %s" % (arguments.model, error))
    edges = [[one["id"], other["id"]] for one, other in zip(nodes, nodes[1:])]
    profile = {
        "model": arguments.model,
        "units": {"fwd_ms": "ms per minibatch", "activation_bytes": "bytes per minibatch"},
        "input": arguments.input,
        "batch_size": arguments.input[0],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "nodes": nodes,
        "edges": edges,
    }
    if arguments.output == "-":
        print(json.dumps(profile), flush=True)  # on one line, as Fairway reads it from the log of a job
    else:
        with open(arguments.output, "w") as file:
            file.write(json.dumps(profile, indent=1) + "\n")
        total = sum(one["fwd_ms"] + one["bwd_ms"] for one in nodes)
        print(
            "%s: %d layers, %.1f ms a minibatch on %s"
            % (arguments.output, len(nodes), total, profile["device"])
        )


def _parse(words):
    parser = argparse.ArgumentParser(prog="profile_layers.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", metavar="MODULE:ATTRIBUTE", help="a torch.nn.Sequential, or a function that returns one"
    )
    parser.add_argument(
        "--input", required=True, type=_shape, metavar="N,...", help="shape of an input; N is the minibatch"
    )
    parser.add_argument(
        "--integers", type=int, metavar="MAX", help="the input are whole numbers below MAX, such as token ids"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="measured repetitions of each layer (default: 10)"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--output", default="profile.json", metavar="FILE", help="- writes to stdout (default: profile.json)"
    )
    arguments = parser.parse_args(words)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    return arguments


def _shape(text):
    try:
        shape = [int(part) for part in text.split(",")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError("%r is not a shape such as 64,3,224,224" % text)
    return shape


def load_model(name):
    """Return the module or the result of the function that ``module:attribute`` names."""
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError("it is not of the form module:attribute")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), attribute)
    return found() if not hasattr(found, "parameters") or isinstance(found, type) else found


def measure(model, example, steps):
    """Return a node of the profile for each child; times are medians in ms, after one repetition to warm up."""
    import torch

    def now():
        if example.is_cuda:
            torch.cuda.synchronize(example.device)
        return time.perf_counter()

    nodes, value = [], example
    for name, layer in model.named_children():
        forward, backward = [], []
        for _ in range(steps + 1):
            leaf = value.detach().requires_grad_(value.is_floating_point())
            given = leaf.clone()  # so that a layer may work in place
            begin = now()
            output = layer(given)
            forward.append(now() - begin)
            if not torch.is_tensor(output):
                raise RuntimeError("layer %s returns a %s, not one tensor" % (name, type(output).__name__))
            if output.requires_grad:
                gradient = torch.ones_like(output)
                begin = now()
                output.backward(gradient)
                backward.append(now() - begin)
        model.zero_grad(set_to_none=True)
        nodes.append(
            {
                "id": name,
                "op": " ".join(str(layer).split())[:200],
                "fwd_ms": 1000 * statistics.median(forward[1:]),
                "bwd_ms": 1000 * statistics.median(backward[1:]) if backward else 0.0,
                "activation_bytes": output.numel() * output.element_size(),
                "parameter_bytes": sum(each.numel() * each.element_size() for each in layer.parameters()),
            }
        )
        value = output.detach()
        report_progress(len(nodes), len(model))
    return nodes


def report_progress(done, layers):
    """Tell Fairway how many layers are measured."""
    print("measured layer %d of %d" % (done, layers), file=sys.stderr, flush=True)
    path = os.environ.get("FAIRWAY_PROGRESS_FILE")
    if path:
        with open(path, "w") as file:
            file.write(str(done))


if __name__ == "__main__":
    main(sys.argv[1:])
