"""Asynchronous training with parameter servers: the coordinator gives steps to workers (TensorFlow)."""

import argparse
import os
import socket
import time

import tensorflow as tf
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=40, help="in each epoch, by all workers together")
parser.add_argument("--learning_rate", type=float, default=0.05)


def serve(resolver):
    """Run a worker or a parameter server until the chief has ended."""
    spec = resolver.cluster_spec()
    tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc")
    host, port = spec.as_dict()["chief"][0].rsplit(":", 1)
    missed = seen = 0
    while missed < 3:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2).close()
            missed, seen = 0, 1
        except OSError:
            missed += seen
        time.sleep(1)
    os._exit(0)


def main(arguments):
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(tf.zeros([8, 1]))

    @tf.function
    def step():
        data = tf.random.normal([64, 8])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((data @ weight - tf.reduce_sum(data, 1, keepdims=True)) ** 2)
        weight.assign_sub(arguments.learning_rate * tape.gradient(loss, weight))
        return loss

    start, loss = 0, 0.0
    if path := newest_checkpoint():
        start = int(path.rpartition("-")[2].partition(".")[0])
        with open(path, "rb") as file:
            weight.assign(tf.io.parse_tensor(file.read(), tf.float32))
    for epoch in range(start, arguments.epochs):
        losses = [coordinator.schedule(step) for _ in range(arguments.steps)]
        coordinator.join()
        loss = float(losses[-1].fetch())
        log(epoch + 1, loss=loss)
        state = tf.io.serialize_tensor(weight.read_value()).numpy()
        save(epoch + 1, lambda path, state=state: tf.io.write_file(path, state), ".tensor")
    print("done: loss", round(loss, 4), flush=True)


if __name__ == "__main__":
    main(parser.parse_args())
