"""Federated learning with Flower: each task keeps its data; only weights travel, and rank 0 averages them.

Rank 0 runs Flower's SuperLink and starts the run; every task is a SuperNode. Both load this file as their app.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
from common import log, newest_checkpoint, save
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--local_steps", type=int, default=40, help="of each task in a round")
parser.add_argument("--learning_rate", type=float, default=0.1)
SIZE = 10
client = ClientApp()
server = ServerApp()


def table(rows, seed, shift=0.0):
    """Return inputs and labels; ``shift`` makes the data of each task different."""
    draw = np.random.default_rng(seed)
    points = draw.normal(shift, 1, (rows, SIZE))
    return points, (points @ np.linspace(-1, 1, SIZE) > 0).astype(float)


def chances(weights, points):
    return 1 / (1 + np.exp(-points @ weights))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Improve the weights with the data of this task."""
    rank, config = int(context.node_config["rank"]), message.content["config"]
    points, label = table(500, 100 + rank, shift=0.3 * rank)
    weights = message.content["arrays"].to_numpy_ndarrays()[0]
    for _ in range(int(config["steps"])):
        weights = weights - config["rate"] * points.T @ (chances(weights, points) - label) / len(points)
    metrics = MetricRecord({"num-examples": len(points)})
    return Message(RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics}), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Average the weights of all tasks in each round."""
    config, start, weights = context.run_config, 0, np.zeros(SIZE)
    if path := newest_checkpoint():
        with np.load(path) as saved:
            start, weights = int(saved["step"]), saved["weights"]
    points, label = table(2000, 1)

    def evaluate(number, arrays):
        found = arrays.to_numpy_ndarrays()[0]
        error = float(np.mean((chances(found, points) > 0.5) != label))
        if number:
            log(start + number, error=error)
            save(start + number, lambda path: write(path, found, start + number), ".npz")
        return MetricRecord({"error": error})

    tasks = int(config["tasks"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=tasks, min_available_nodes=tasks)
    given = ConfigRecord({"steps": config["steps"], "rate": config["rate"]})
    result = strategy.start(
        grid, ArrayRecord([weights]), num_rounds=max(0, int(config["rounds"]) - start), train_config=given,
        evaluate_fn=evaluate,
    )  # fmt: skip
    error = float(np.mean((chances(result.arrays.to_numpy_ndarrays()[0], points) > 0.5) != label))
    print("done: error %.4f after %d rounds of %d tasks" % (error, config["rounds"], tasks), flush=True)


def write(path, weights, step):
    with open(path, "wb") as file:
        np.savez(file, weights=weights, step=step)


def wait_for(address, seconds=60):
    """Wait until the SuperLink listens."""
    for _ in range(seconds):
        if is_open(address):
            return
        time.sleep(1)
    raise SystemExit("Flower's SuperLink did not start.")


def is_open(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
        return True
    except OSError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(arguments):
    rank, tasks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    fleet = "%s:%s" % (
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        os.environ.get("MASTER_PORT") or free_port(),
    )
    folder = tempfile.mkdtemp()
    os.environ["FLWR_HOME"] = folder
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    services = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the services below
    try:
        if rank == 0:
            words = ["--insecure", "--host", "0.0.0.0", "--port", fleet.rpartition(":")[2]]  # noqa: S104 - the other tasks connect
            words += ["--disable-runtime-dependency-installation"]
            services.append(subprocess.Popen(["flower-superlink", *words]))
        words = ["--superlink", fleet, "--node-config", "rank=%d" % rank, "--port", str(free_port())]
        words += ["--insecure", "--max-retries", "20", "--max-wait-time", "30"]
        services.append(subprocess.Popen(["flower-supernode", *words]))
        if rank:
            wait_for(fleet)
            missed = 0
            while missed < 3 and services[0].poll() is None:  # until rank 0 has ended
                time.sleep(1)
                missed = 0 if is_open(fleet) else missed + 1
            return 0
        app = os.path.join(folder, "app")
        os.mkdir(app)
        shutil.copy(__file__, os.path.join(app, "federated.py"))
        with open(os.path.join(app, "pyproject.toml"), "w") as project:
            project.write(PROJECT % (arguments.rounds, arguments.local_steps, arguments.learning_rate, tasks))
        with open(os.path.join(folder, "config.toml"), "w") as config:
            config.write(
                '[superlink]\ndefault = "job"\n\n[superlink.job]\naddress = "%s"\ninsecure = true\n' % fleet
            )
        wait_for(fleet)
        return subprocess.call(["flwr", "run", app, "job", "--stream"])
    finally:
        for each in reversed(services):
            each.send_signal(signal.SIGTERM)
        for each in services:
            try:
                each.wait(20)
            except subprocess.TimeoutExpired:
                each.kill()
        shutil.rmtree(folder, ignore_errors=True)


PROJECT = """[project]
name = "federated"
description = "An example of federated learning"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fairway"

[tool.flwr.app.components]
serverapp = "federated:server"
clientapp = "federated:client"

[tool.flwr.app.config]
rounds = %d
steps = %d
rate = %g
tasks = %d
"""

if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
