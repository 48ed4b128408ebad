"""Keras on several GPUs of a task, or on several workers that find each other by TF_CONFIG."""

import argparse
import json
import os

import numpy as np
import tensorflow as tf
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=30, help="in each epoch")
parser.add_argument("--batch_size", type=int, default=64, help="of each replica")
parser.add_argument("--learning_rate", type=float, default=0.05)


def main(arguments):
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
    several = len(cluster.get("cluster", {}).get("worker", [])) > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()
    is_chief = cluster.get("task", {}).get("index", 0) == 0
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input([8]), tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(1)]
        )
        weights = [tf.Variable(each, aggregation=tf.VariableAggregation.MEAN) for each in model.get_weights()]

    def forward(data):  # Keras 3 does not compile models for several workers: its layers run as functions
        hidden = tf.nn.relu(data @ weights[0] + weights[1])
        return (hidden @ weights[2] + weights[3])[:, 0]

    @tf.function
    def step():
        def on_replica():
            data = tf.random.normal([arguments.batch_size, 8])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((forward(data) - tf.reduce_sum(tf.abs(data), 1)) ** 2)
            gradients = tape.gradient(loss, weights)
            gradients = tf.distribute.get_replica_context().all_reduce("mean", gradients)
            for weight, gradient in zip(weights, gradients):
                weight.assign_sub(arguments.learning_rate * gradient)
            return loss

        return strategy.reduce("mean", strategy.run(on_replica), axis=None)

    start, loss = 0, 0.0
    if path := newest_checkpoint():
        start = int(path.rpartition("-")[2].partition(".")[0])
        with np.load(path) as saved:
            for number, weight in enumerate(weights):
                weight.assign(saved["arr_%d" % number])
    for epoch in range(start, arguments.epochs):
        for _ in range(arguments.steps):
            loss = float(step())
        if is_chief:
            log(epoch + 1, loss=loss)
            save(epoch + 1, lambda path: write(weights, path), ".npz")
    print("done:", strategy.num_replicas_in_sync, "replicas, loss", round(loss, 4), flush=True)


def write(weights, path):
    with open(path, "wb") as file:
        np.savez(file, *[weight.numpy() for weight in weights])


if __name__ == "__main__":
    main(parser.parse_args())
