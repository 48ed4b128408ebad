"""DeepSpeed: ZeRO divides optimizer states, gradients or parameters among the processes."""

import argparse

import deepspeed
import torch
from common import log

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch_size", type=int, default=8, help="of each GPU")
parser.add_argument("--learning_rate", type=float, default=0.05)
parser.add_argument("--zero_stage", type=int, default=1)


def main(arguments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": arguments.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": arguments.learning_rate, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.zero_stage},
    })  # fmt: skip
    for step in range(arguments.steps):
        data = torch.randn(arguments.batch_size, 32, device=engine.device)
        loss = (engine(data)[:, 0] - data.abs().sum(1)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and (step + 1) % 20 == 0:
            log(step + 1, loss=loss.item())
    print("done: rank", engine.global_rank)


if __name__ == "__main__":
    main(parser.parse_args())
