"""XGBoost on a Ray cluster: each worker holds a part of the rows, and all grow the same trees."""

import argparse

import numpy as np
import ray
import xgboost
from common import log, newest_checkpoint, save
from xgboost.tracker import RabitTracker

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--rows", type=int, default=20000)
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--max_depth", type=int, default=5)
parser.add_argument("--learning_rate", type=float, default=0.3)


def table(rows, seed):
    """Return columns, and a number that depends on some of them."""
    draw = np.random.default_rng(seed)
    data = draw.normal(size=(rows, 10))
    return data, data[:, 0] * data[:, 1] + np.sin(2 * data[:, 2]) + 0.1 * draw.normal(size=rows)


def train(rank, tracker, arguments, model):
    """Grow trees with the other workers; return the model in rank 0."""
    with xgboost.collective.CommunicatorContext(**tracker):
        part = xgboost.DMatrix(*table(arguments.rows // arguments.workers, 1 + rank))
        options = {"max_depth": arguments.max_depth, "eta": arguments.learning_rate, "tree_method": "hist"}
        options["device"] = "cuda" if ray.get_gpu_ids() else "cpu"
        start = xgboost.Booster(model_file=bytearray(model)) if model else None
        grown = xgboost.train(options, part, arguments.rounds // 4, xgb_model=start)
        return bytes(grown.save_raw()) if xgboost.collective.get_rank() == 0 else None


def main(arguments):
    ray.init()
    gpus = min(1, ray.cluster_resources().get("GPU", 0) / arguments.workers)
    worker = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else 1)(train)
    test, wanted = table(5000, 0)
    model, done, error = None, 0, float("nan")
    if path := newest_checkpoint():
        done = int(path.rpartition("-")[2].partition(".")[0])
        with open(path, "rb") as file:
            model = file.read()
    for _ in range(done, arguments.rounds, max(1, arguments.rounds // 4)):
        tracker = RabitTracker(host_ip=ray.util.get_node_ip_address(), n_workers=arguments.workers)
        tracker.start()
        found = [
            worker.remote(rank, tracker.worker_args(), arguments, model) for rank in range(arguments.workers)
        ]
        model = next(each for each in ray.get(found) if each)
        done += max(1, arguments.rounds // 4)
        trees = xgboost.Booster(model_file=bytearray(model))
        error = float(np.sqrt(np.mean((trees.predict(xgboost.DMatrix(test)) - wanted) ** 2)))
        log(done, error=error)
        save(done, lambda path, model=model: write(path, model), ".ubj")
    print(
        "done: error %.4f of %d trees, %d workers on %d nodes"
        % (error, done, arguments.workers, len(ray.nodes()))
    )


def write(path, model):
    with open(path, "wb") as file:
        file.write(model)


if __name__ == "__main__":
    main(parser.parse_args())
