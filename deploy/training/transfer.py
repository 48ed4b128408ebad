"""Transfer learning: a network learns many shapes; then only a new head learns other shapes from few images."""

import argparse

import torch
from common import log, newest_checkpoint, save
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--pretrain_epochs", type=int, default=10)
parser.add_argument("--epochs", type=int, default=40, help="of the new head")
parser.add_argument("--images_per_class", type=int, default=5, help="of the new shapes")
parser.add_argument("--learning_rate", type=float, default=0.02)
parser.add_argument(
    "--freeze", choices=["true", "false"], default="true", help="keep the features as they are"
)
SIZE, OLD, NEW = 20, 12, 4


def shapes(kinds, count, draw):
    """Return images of closed curves: kind k has k + 2 lobes, random size, place and noise."""
    kind = torch.arange(count) % len(kinds)
    lobes = torch.tensor(kinds, dtype=torch.float)[kind].view(-1, 1, 1) % 6 + 2
    depth = torch.where(torch.tensor(kinds)[kind] < 6, 0.25, 0.5).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    x = x - 0.2 * torch.rand(count, 1, 1, generator=draw) + 0.1
    y = y - 0.2 * torch.rand(count, 1, 1, generator=draw) + 0.1
    turn = 0.6 * torch.rand(count, 1, 1, generator=draw)
    edge = 0.65 * (1 + depth * torch.cos(lobes * (torch.atan2(y, x) + turn)))
    image = ((x**2 + y**2).sqrt() < edge).float()
    return (image + 0.15 * torch.randn(image.shape, generator=draw)).unsqueeze(1), kind


def fit(parts, optimizer, images, labels, seed):
    """Train an epoch; return the loss of its last batch."""
    loss = torch.zeros(())
    for part in torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).split(64):
        loss = nn.functional.cross_entropy(parts(images[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(arguments):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    features = nn.Sequential(
        nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48 * 25, 64), nn.ReLU(),
    ).to(device)  # fmt: skip
    head = nn.Linear(64, NEW).to(device)
    start, accuracy = 0, 0.0
    path = newest_checkpoint()
    if path:
        saved = torch.load(path, weights_only=True)
        start = saved["step"]
        features.load_state_dict(saved["features"])
        head.load_state_dict(saved["head"])
    else:
        old = [kind for kind in range(OLD) if kind % 3]
        images, labels = (each.to(device) for each in shapes(old, 3000, draw))
        whole = nn.Sequential(features, nn.Linear(64, len(old)).to(device))
        optimizer = torch.optim.Adam(whole.parameters(), lr=0.002)
        for epoch in range(arguments.pretrain_epochs):
            print(
                "pre-training, epoch",
                epoch + 1,
                "loss %.4f" % fit(whole, optimizer, images, labels, epoch),
                flush=True,
            )
    new = [kind for kind in range(OLD) if not kind % 3]
    draw = torch.Generator().manual_seed(3)
    images, labels = (each.to(device) for each in shapes(new, NEW * arguments.images_per_class, draw))
    test, wanted = (each.to(device) for each in shapes(new, 1000, draw))
    features.requires_grad_(arguments.freeze == "false")
    whole = nn.Sequential(features, head)
    optimizer = torch.optim.Adam(
        [each for each in whole.parameters() if each.requires_grad], lr=arguments.learning_rate
    )
    for epoch in range(start, arguments.epochs):
        loss = fit(whole, optimizer, images, labels, epoch)
        with torch.no_grad():
            accuracy = (whole(test).argmax(1) == wanted).float().mean().item()
        if (epoch + 1) % 10 == 0 or epoch + 1 == arguments.epochs:
            log(epoch + 1, accuracy=accuracy, loss=loss)
            state = {"step": epoch + 1, "features": features.state_dict(), "head": head.state_dict()}
            save(epoch + 1, lambda path, state=state: torch.save(state, path))
    print("done: accuracy %.3f with %d images of each new shape" % (accuracy, arguments.images_per_class))


if __name__ == "__main__":
    main(parser.parse_args())
