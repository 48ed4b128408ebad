"""Horovod: gradients are averaged over all processes; elastic where the job is."""

import argparse
import os

import horovod.torch as hvd
import torch
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, default=40, help="in each epoch")
parser.add_argument("--batch_size", type=int, default=64, help="of each process")
parser.add_argument("--learning_rate", type=float, default=0.05)


def main(arguments):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    torch.manual_seed(hvd.rank())  # each process draws data of its own
    if hvd.rank() == 0 and (path := newest_checkpoint()):
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        state.epoch = saved["step"]

    def train(state):
        loss = torch.zeros(())
        while state.epoch < arguments.epochs:
            for _ in range(arguments.steps):
                data = torch.randn(arguments.batch_size, 32)
                loss = (model(data)[:, 0] - data.abs().mean(1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            state.epoch += 1
            if hvd.rank() == 0:
                log(state.epoch, loss=loss.item())
                saved = {"step": state.epoch, "model": model.state_dict()}
                save(state.epoch, lambda path, saved=saved: torch.save(saved, path))
            if is_elastic:
                state.commit()

    is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
    if is_elastic:
        hvd.elastic.run(train)(state)
    else:
        state.sync()
        train(state)
    print("done: rank", hvd.rank(), "of", hvd.size())


if __name__ == "__main__":
    main(parser.parse_args())
