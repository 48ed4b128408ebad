"""Evolution strategy: a population of controllers learns to balance a pole on a cart (NumPy, all CPU cores)."""

import argparse
import concurrent.futures
import os

import numpy as np
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--generations", type=int, default=30)
parser.add_argument("--population", type=int, default=64)
parser.add_argument("--sigma", type=float, default=0.3, help="standard deviation of mutations")
parser.add_argument("--learning_rate", type=float, default=0.3)
HIDDEN, STEPS = 8, 500
SIZE = 4 * HIDDEN + HIDDEN


def balance(task):
    """Return for how many steps a controller keeps the pole upright."""
    weights, seed = task
    first, second = weights[: 4 * HIDDEN].reshape(4, HIDDEN), weights[4 * HIDDEN :]
    x, speed, angle, turn = np.random.default_rng(seed).uniform(-0.05, 0.05, 4)
    for step in range(STEPS):
        force = 10.0 if np.tanh(np.array([x, speed, angle, turn]) @ first) @ second > 0 else -10.0
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turn**2 * sine) / 1.1
        turn_change = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        x, speed = x + 0.02 * speed, speed + 0.02 * (push - 0.05 * turn_change * cosine / 1.1)
        angle, turn = angle + 0.02 * turn, turn + 0.02 * turn_change
        if abs(x) > 2.4 or abs(angle) > 0.2:
            return step
    return STEPS


def main(arguments):
    mean, start, best = np.zeros(SIZE), 0, 0.0
    if path := newest_checkpoint():
        with np.load(path) as saved:
            mean, start = saved["mean"], int(saved["step"])
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for generation in range(start, arguments.generations):
            draw = np.random.default_rng(generation)
            half = draw.normal(size=(arguments.population // 2, SIZE))
            noise = np.concatenate([half, -half])  # mirrored mutations
            tasks = [(mean + arguments.sigma * each, generation) for each in noise]
            scores = np.array(list(pool.map(balance, tasks, chunksize=8)), dtype=float)
            ranks = scores.argsort().argsort() / (len(scores) - 1) - 0.5
            mean = mean + arguments.learning_rate * ranks @ noise / (len(scores) * arguments.sigma) * 10
            best = float(np.mean([balance((mean, 1000 + seed)) for seed in range(5)]))
            log(generation + 1, steps_balanced=best, best_of_population=scores.max())
            save(generation + 1, lambda path, mean=mean, step=generation + 1: write(path, mean, step), ".npz")
    print("done: balanced", best, "of", STEPS, "steps")


def write(path, mean, step):
    with open(path, "wb") as file:
        np.savez(file, mean=mean, step=step)


if __name__ == "__main__":
    main(parser.parse_args())
