"""Spark, barrier mode: all tasks of a stage run at once and average their gradients in each step."""

import argparse

from common import log
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--learning_rate", type=float, default=0.3)


def trainer(arguments):
    """Return the function of a task: fit ``y = weight * x`` to its rows, together with the other tasks."""

    def train(rows):
        task, rows, weight, losses = BarrierTaskContext.get(), list(rows), 0.0, []
        for _ in range(arguments.steps):
            slope = sum(2 * (weight * x - y) * x for x, y in rows) / len(rows)
            slopes = [float(each) for each in task.allGather(repr(slope))]
            weight -= arguments.learning_rate * sum(slopes) / len(slopes)
            losses.append(sum((weight * x - y) ** 2 for x, y in rows) / len(rows))
        yield task.partitionId(), weight, losses

    return train


def main(arguments):
    context = SparkSession.builder.getOrCreate().sparkContext
    size = int(context.getConf().get("spark.cores.max", "2"))
    rows = [(x / 100, 3 * x / 100) for x in range(100)]
    found = context.parallelize(rows, size).barrier().mapPartitions(trainer(arguments)).collect()
    for step, loss in enumerate(found[0][2], 1):
        log(step, loss=loss)
    print("done: weight %.3f of %d tasks" % (found[0][1], len(found)))


if __name__ == "__main__":
    main(parser.parse_args())
