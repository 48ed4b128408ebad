"""Reinforcement learning: an actor and a critic learn to balance a pole on a cart, in many simulations at once."""

import argparse

import torch
from common import log, newest_checkpoint, save
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--simulations", type=int, default=64, help="at once")
parser.add_argument("--horizon", type=int, default=32, help="steps of each simulation in an iteration")
parser.add_argument("--learning_rate", type=float, default=0.003)
parser.add_argument("--discount", type=float, default=0.98)


class CartPoles:
    """Carts with a pole, computed together; a cart starts again when its pole falls or after 500 steps."""

    def __init__(self, count, device):
        self.state = torch.empty(count, 4, device=device)
        self.age = torch.zeros(count, device=device)
        self.restart(torch.ones(count, dtype=torch.bool, device=device))

    def restart(self, which):
        self.state[which] = torch.rand(int(which.sum()), 4, device=self.state.device) * 0.1 - 0.05
        self.age[which] = 0

    def step(self, action):
        """Push to the right where the action is 1; return what fell, and the lengths of the runs that ended."""
        _, speed, angle, turn = self.state.unbind(1)
        force = 20.0 * action - 10.0
        sine, cosine = angle.sin(), angle.cos()
        push = (force + 0.05 * turn**2 * sine) / 1.1
        turn_change = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        change = torch.stack([speed, push - 0.05 * turn_change * cosine / 1.1, turn, turn_change], 1)
        self.state = self.state + 0.02 * change
        self.age = self.age + 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2)
        ended = fell | (self.age >= 500)
        lengths = self.age[ended].tolist()
        self.restart(ended)
        return fell, ended, lengths


def main(arguments):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    both = nn.ModuleList([actor, critic])
    optimizer = torch.optim.Adam(both.parameters(), lr=arguments.learning_rate)
    start, length = 0, 0.0
    if path := newest_checkpoint():
        saved = torch.load(path, weights_only=True)
        start = saved["step"]
        both.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    carts, lengths = CartPoles(arguments.simulations, device), []
    for iteration in range(start, arguments.iterations):
        log_chances, values, entropies, falls, ends = [], [], [], [], []
        for _ in range(arguments.horizon):
            seen = carts.state.clone()
            choice = torch.distributions.Categorical(logits=actor(seen))
            action = choice.sample()
            fell, ended, ran = carts.step(action.float())
            lengths += ran
            log_chances.append(choice.log_prob(action))
            entropies.append(choice.entropy())
            values.append(critic(seen)[:, 0])
            falls.append(fell)
            ends.append(ended)
        with torch.no_grad():
            future, returns = critic(carts.state)[:, 0], []
            for fell, ended, value in zip(reversed(falls), reversed(ends), reversed(values)):
                future = torch.where(ended & ~fell, value, 1 + arguments.discount * future * ~fell)
                returns.insert(0, future)
        expected, value = torch.stack(returns), torch.stack(values)
        better = (expected - value).detach()
        better = (better - better.mean()) / (better.std() + 1e-6)
        loss = -(torch.stack(log_chances) * better).mean() - 0.01 * torch.stack(entropies).mean()
        loss = loss + 0.5 * nn.functional.smooth_l1_loss(value, expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        if (iteration + 1) % 10 == 0 or iteration + 1 == arguments.iterations:
            lengths = lengths[-100:]
            length = sum(lengths) / max(1, len(lengths))
            log(iteration + 1, steps_balanced=length)
            state = {"step": iteration + 1, "model": both.state_dict(), "optimizer": optimizer.state_dict()}
            save(iteration + 1, lambda path, state=state: torch.save(state, path))
    print("done: balanced %.0f steps on average" % length)


if __name__ == "__main__":
    main(parser.parse_args())
