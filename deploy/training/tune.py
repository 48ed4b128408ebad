"""A trial of a sweep: a small network in NumPy learns two spirals. It reports its error after each epoch."""

import argparse

import numpy as np
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=27)
parser.add_argument("--learning_rate", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--hidden", type=int, default=32)
BATCH = 32


def spirals(count, draw):
    """Return points on two spirals, and which of them each is on."""
    label = draw.integers(0, 2, count)
    turn = draw.uniform(0.5, 3.5, count)
    angle = turn * np.pi + label * np.pi
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) / 3.5
    return points + draw.normal(0, 0.02, points.shape), label


def forward(weights, points):
    hidden = np.tanh(points @ weights[0] + weights[1])
    hidden2 = np.tanh(hidden @ weights[2] + weights[3])
    return hidden, hidden2, 1 / (1 + np.exp(-(hidden2 @ weights[4] + weights[5])[:, 0]))


def gradients(weights, points, label):
    hidden, hidden2, found = forward(weights, points)
    out = ((found - label) / len(label))[:, None]
    back2 = out @ weights[4].T * (1 - hidden2**2)
    back = back2 @ weights[2].T * (1 - hidden**2)
    return [points.T @ back, back.sum(0), hidden.T @ back2, back2.sum(0), hidden2.T @ out, out.sum(0)]


def main(arguments):
    draw = np.random.default_rng(0)
    size = arguments.hidden
    shapes = [(2, size), (size,), (size, size), (size,), (size, 1), (1,)]
    weights = [draw.normal(0, 1.5 / np.sqrt(shape[0]), shape) for shape in shapes]
    speeds, start = [np.zeros(shape) for shape in shapes], 0
    points, label = spirals(1024, draw)
    test_points, test_label = spirals(512, draw)
    if path := newest_checkpoint():
        with np.load(path) as saved:
            start = int(saved["step"])
            weights = [saved["weight%d" % number] for number in range(6)]
            speeds = [saved["speed%d" % number] for number in range(6)]
    for epoch in range(start, arguments.epochs):
        order = np.random.default_rng(epoch).permutation(len(points))
        for part in np.split(order, len(points) // BATCH):
            for number, gradient in enumerate(gradients(weights, points[part], label[part])):
                speeds[number] = arguments.momentum * speeds[number] - arguments.learning_rate * gradient
                weights[number] = weights[number] + speeds[number]
        error = float(np.mean((forward(weights, test_points)[2] > 0.5) != test_label))
        log(epoch + 1, error=error)
        state = {"step": epoch + 1}
        for number in range(6):
            state.update({"weight%d" % number: weights[number], "speed%d" % number: speeds[number]})
        save(epoch + 1, lambda path, state=state: write(path, state), ".npz")
    print("done: error", float(np.mean((forward(weights, test_points)[2] > 0.5) != test_label)))


def write(path, state):
    with open(path, "wb") as file:
        np.savez(file, **state)


if __name__ == "__main__":
    main(parser.parse_args())
