"""JAX on several processes: each computes gradients of its data, and all use their mean."""

import argparse
import os

import jax
import jax.numpy as jnp
from common import log
from jax.experimental import multihost_utils

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch_size", type=int, default=64, help="of each process")
parser.add_argument("--learning_rate", type=float, default=0.1)


def loss_of(weights, data):
    return jnp.mean((data @ weights - data.sum(1)) ** 2)


def main(arguments):
    if "JAX_NUM_PROCESSES" in os.environ:
        count, number = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(num_processes=count, process_id=number)
    weights, loss = jnp.zeros(8), 0.0
    gradient_of = jax.jit(jax.value_and_grad(loss_of))
    for step in range(arguments.steps):
        key = jax.random.PRNGKey(1000 * step + jax.process_index())
        loss, gradient = gradient_of(weights, jax.random.normal(key, (arguments.batch_size, 8)))
        gradients = multihost_utils.process_allgather(gradient).reshape(jax.process_count(), -1)
        weights = weights - arguments.learning_rate * gradients.mean(0)
        if jax.process_index() == 0 and (step + 1) % 20 == 0:
            log(step + 1, loss=float(loss))
    print("done: process", jax.process_index(), "of", jax.process_count(), "loss %.4f" % float(loss))


if __name__ == "__main__":
    main(parser.parse_args())
