"""Semi-supervised learning: few labelled points and many without; confident guesses become labels (FixMatch)."""

import argparse

import torch
from common import log, newest_checkpoint, save
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--labelled", type=int, default=10, help="labelled points")
parser.add_argument("--unlabelled", type=int, default=2000, help="points without a label")
parser.add_argument("--confidence", type=float, default=0.9, help="from which a guess counts as a label")
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument(
    "--unlabelled_weight", type=float, default=1.0, help="0: learn from the labelled points alone"
)


def moons(count, draw):
    """Return points of two half circles, and which of them each is on."""
    label = torch.arange(count) % 2
    angle = torch.rand(count, generator=draw) * torch.pi
    side = 1.0 - 2.0 * label
    points = torch.stack([side * angle.cos() + label, side * angle.sin() + 0.5 * label], 1)
    return points + 0.08 * torch.randn(count, 2, generator=draw), label


def main(arguments):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    points, labels = (each.to(device) for each in moons(arguments.labelled, draw))
    free = moons(arguments.unlabelled, draw)[0].to(device)
    test, wanted = (each.to(device) for each in moons(1000, draw))
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    start, accuracy = 0, 0.0
    if path := newest_checkpoint():
        saved = torch.load(path, weights_only=True)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(start, arguments.epochs):
        torch.manual_seed(epoch)
        for part in free[torch.randperm(len(free), device=device)].split(200):
            loss = nn.functional.cross_entropy(model(points + 0.05 * torch.randn_like(points)), labels)
            with torch.no_grad():
                sure, guess = model(part + 0.02 * torch.randn_like(part)).softmax(1).max(1)
            strong = nn.functional.cross_entropy(
                model(part + 0.15 * torch.randn_like(part)), guess, reduction="none"
            )
            loss = loss + arguments.unlabelled_weight * (strong * (sure > arguments.confidence)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test).argmax(1) == wanted).float().mean().item()
        log(epoch + 1, accuracy=accuracy, loss=loss.item())
        state = {"step": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(epoch + 1, lambda path, state=state: torch.save(state, path))
    print("done: accuracy %.3f with %d labels" % (accuracy, arguments.labelled))


if __name__ == "__main__":
    main(parser.parse_args())
