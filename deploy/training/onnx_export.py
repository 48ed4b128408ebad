"""Export for edge devices: train a small network, export it to ONNX, compare it, and quantise it to 8 bits."""

import argparse
import os

import numpy as np
import onnxruntime
import torch
from common import log, newest_checkpoint, save
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--learning_rate", type=float, default=0.005)
parser.add_argument("--tolerance", type=float, default=0.0001, help="largest difference of exported outputs")
parser.add_argument("--output", default="edge-model", help="folder of the exported files")


def rings(count, seed):
    """Return points in 16 dimensions, and in which of four shells each lies."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 16, generator=draw)
    shell = torch.randint(0, 4, (count,), generator=draw)
    points = (
        points
        / points.norm(dim=1, keepdim=True)
        * (1 + shell.view(-1, 1) + 0.3 * torch.rand(count, 1, generator=draw))
    )
    return points, shell


def run(path, points):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: points.numpy()})[0]


def main(arguments):
    torch.manual_seed(0)
    hidden = arguments.hidden
    model = nn.Sequential(
        nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    points, label = rings(4096, 1)
    start = 0
    if path := newest_checkpoint():
        saved = torch.load(path, weights_only=True)
        start = saved["step"]
        model.load_state_dict(saved["model"])
    for epoch in range(start, arguments.epochs):
        for part in torch.randperm(len(points)).split(128):
            loss = nn.functional.cross_entropy(model(points[part]), label[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (epoch + 1) % 5 == 0 or epoch + 1 == arguments.epochs:
            log(epoch + 1, loss=loss.item())
            save(
                epoch + 1,
                lambda path, step=epoch + 1: torch.save({"step": step, "model": model.state_dict()}, path),
            )
    os.makedirs(arguments.output, exist_ok=True)
    whole, small = (os.path.join(arguments.output, name) for name in ("model.onnx", "model-int8.onnx"))
    test, wanted = rings(1000, 2)
    model.eval()
    torch.onnx.export(
        model, (test,), whole, input_names=["points"], output_names=["scores"], dynamo=True, external_data=False,
        dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False,
    )  # fmt: skip
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8)
    exact = model(test).detach().numpy()
    difference = float(np.abs(run(whole, test) - exact).max())
    accuracies = [float((scores.argmax(1) == wanted.numpy()).mean()) for scores in (exact, run(small, test))]
    if difference > arguments.tolerance:
        raise SystemExit("The exported model differs by %g." % difference)
    print("done: difference %.1e, accuracy %.3f, of 8 bits %.3f, %d to %d bytes"
          % (difference, *accuracies, os.path.getsize(whole), os.path.getsize(small)))  # fmt: skip


if __name__ == "__main__":
    main(parser.parse_args())
