"""Image classification with DDP, FSDP or DataParallel: a small network learns the angle of noisy stripes."""

import argparse
import os

import torch
import torch.distributed as dist
from common import log, newest_checkpoint, save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--strategy", choices=["ddp", "fsdp", "data_parallel"], default="ddp")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=64, help="of each process")
parser.add_argument("--learning_rate", type=float, default=0.1)
parser.add_argument("--images", type=int, default=4096, help="in each epoch")
parser.add_argument("--classes", type=int, default=8)
SIZE = 16


def stripes(count, classes, draw):
    """Return images whose class is the angle of their stripes."""
    angle_class = torch.randint(0, classes, (count,), generator=draw)
    angle = (angle_class * torch.pi / classes).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    phase = torch.rand(count, 1, 1, generator=draw) * 6.3
    image = torch.sin(x * torch.cos(angle) + y * torch.sin(angle) + phase)
    return (image + 0.3 * torch.randn(image.shape, generator=draw)).unsqueeze(1), angle_class


def network(classes):
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(32 * 16, classes),
    )  # fmt: skip


def main(arguments):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = arguments.strategy == "data_parallel" or "RANK" not in os.environ
    if not alone:
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = network(arguments.classes).to(device)
    start = load(model) if rank == 0 else 0
    if not alone:  # only rank 0 reads the checkpoint: the others may run on nodes without it
        with torch.no_grad():
            for each in model.state_dict().values():
                dist.broadcast(each, 0)
        step = [start]
        dist.broadcast_object_list(step, 0)
        start = step[0]
        if arguments.strategy == "fsdp":
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
    elif torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    loss, accuracy = torch.zeros(()), 0.0
    for epoch in range(start, arguments.epochs):
        draw = torch.Generator().manual_seed(1000 * epoch + rank)
        right = seen = 0
        for _ in range(max(1, arguments.images // (arguments.batch_size * world))):
            image, wanted = stripes(arguments.batch_size, arguments.classes, draw)
            found = model(image.to(device))
            loss = nn.functional.cross_entropy(found, wanted.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, seen = right + int((found.argmax(1).cpu() == wanted).sum()), seen + len(wanted)
        accuracy = right / seen
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            log(epoch + 1, loss=loss.item(), accuracy=accuracy)
            save(
                epoch + 1,
                lambda path, state=state, step=epoch + 1: torch.save({"step": step, "model": state}, path),
            )
    print("done: rank", rank, "of", world, "loss", round(loss.item(), 4), "accuracy", round(accuracy, 3))
    if not alone:
        dist.destroy_process_group()


def load(model):
    """Load the newest checkpoint; return its epoch."""
    path = newest_checkpoint()
    if not path:
        return 0
    saved = torch.load(path, weights_only=True)
    set_model_state_dict(model, saved["model"])
    return saved["step"]


if __name__ == "__main__":
    main(parser.parse_args())
