"""Fine-tune a language model with LoRA: a small decoder learns counting, then only adapters learn to count back."""

import argparse

import torch
from accelerate import Accelerator
from common import log, newest_checkpoint, save
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--pretrain_steps", type=int, default=200)
parser.add_argument("--steps", type=int, default=300, help="of fine-tuning")
parser.add_argument("--rank", type=int, default=4, help="of the adapters")
parser.add_argument("--learning_rate", type=float, default=0.005)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
LENGTH, WORDS = 16, 32


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Decoder(nn.Module):
    """A language model as GPT, small enough to be trained in seconds."""

    def __init__(self, width, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, text):
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


class LoraLayer(nn.Module):
    """A frozen layer plus a product of two low matrices (LoRA, https://arxiv.org/abs/2106.09685)."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(layer.in_features, rank) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, x):
        return self.layer(x) + 2 * (x @ self.lora_a @ self.lora_b)


def add_adapters(model, rank):
    """Freeze the model, and adapt the linear layers of its blocks."""
    model.requires_grad_(False)
    for module in [each for each in model.blocks.modules() if not isinstance(each, nn.Linear)]:
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, LoraLayer(layer, rank))


def texts(direction, draw, count=32):
    """Return sequences that count up or down from a random word."""
    first = torch.randint(0, WORDS, (count, 1), generator=draw)
    return (first + direction * torch.arange(LENGTH + 1)) % WORDS


def loss_of(model, text):
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(accelerator, model, optimizer, direction, steps):
    """Yield the loss of each step."""
    for step in range(*steps):
        draw = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
        loss = loss_of(model, texts(direction, draw).to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1, loss.item()


def main(arguments):
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Decoder(arguments.width, arguments.layers).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step, loss in train(accelerator, model, optimizer, 1, (0, arguments.pretrain_steps)):
        if step % 100 == 0 and accelerator.is_main_process:
            print("pre-training, step", step, "loss %.4f" % loss, flush=True)
    torch.manual_seed(1)
    add_adapters(model, arguments.rank)
    model.to(accelerator.device)
    start, path = 0, newest_checkpoint()
    if path:
        saved = torch.load(path, weights_only=True)
        start = saved["step"]
        model.load_state_dict(saved["adapters"], strict=False)
    trained = [each for each in model.parameters() if each.requires_grad]
    share = 100 * sum(map(torch.numel, trained)) / sum(map(torch.numel, model.parameters()))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=arguments.learning_rate))
    loss = float("nan")
    for step, loss in train(accelerator, model, optimizer, -1, (start, arguments.steps)):
        if accelerator.is_main_process and (step % 50 == 0 or step == arguments.steps):
            log(step, loss=loss)
            whole = accelerator.unwrap_model(model).state_dict()
            state = {
                "step": step,
                "adapters": {name: each for name, each in whole.items() if "lora_" in name},
            }
            save(step, lambda path, state=state: torch.save(state, path))
    print("done: process", accelerator.process_index, "of", accelerator.num_processes,
          "loss %.4f, %.1f %% of the weights trained" % (loss, share), flush=True)  # fmt: skip
    accelerator.end_training()


if __name__ == "__main__":
    main(parser.parse_args())
