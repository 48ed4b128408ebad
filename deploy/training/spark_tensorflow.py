"""Spark with TensorFlow: the tasks of a barrier stage are its workers, and train on the rows of their partition."""

import argparse
import json
import os
import socket

from common import log
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--learning_rate", type=float, default=0.3)


def trainer(arguments):
    """Return the function of a task: fit ``y = weight * x`` to all rows by MultiWorkerMirroredStrategy."""

    def train(rows):
        task, rows = BarrierTaskContext.get(), list(rows)
        host = task.getTaskInfos()[task.partitionId()].address.rpartition(":")[0]
        with socket.create_server((host, 0)) as found:
            port = found.getsockname()[1]
        workers = task.allGather("%s:%d" % (host, port))
        place = {"type": "worker", "index": task.partitionId()}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": place})
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()  # finds the others by TF_CONFIG
        with strategy.scope():
            weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        x, y = (tf.constant(each, tf.float32) for each in zip(*rows))

        def on_replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((weight * x - y) ** 2)
            slope = tf.distribute.get_replica_context().all_reduce("mean", tape.gradient(loss, weight))
            weight.assign_sub(arguments.learning_rate * slope)
            return loss

        def step():
            return strategy.reduce("mean", strategy.run(on_replica), axis=None)

        compiled = tf.function(step, autograph=False)
        losses = [float(compiled()) for _ in range(arguments.steps)]
        task.barrier()  # the first worker coordinates the others until they are done
        yield strategy.num_replicas_in_sync, float(weight.numpy()), losses

    return train


def main(arguments):
    context = SparkSession.builder.getOrCreate().sparkContext
    size = int(context.getConf().get("spark.cores.max", "2"))
    rows = [(x / 100, 3 * x / 100) for x in range(100)]
    found = context.parallelize(rows, size).barrier().mapPartitions(trainer(arguments)).collect()
    replicas, weight, losses = found[0]
    for step, loss in enumerate(losses, 1):
        log(step, loss=loss)
    print("done: weight %.3f of %d replicas" % (weight, replicas))


if __name__ == "__main__":
    main(parser.parse_args())
