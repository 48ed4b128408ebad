"""Robot navigation: a robot with distance sensors learns to reach a goal between walls (Q-learning, NumPy)."""

import argparse

import numpy as np
from common import log, newest_checkpoint, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--episodes", type=int, default=2000)
parser.add_argument("--size", type=int, default=12, help="of the square, in cells")
parser.add_argument("--walls", type=float, default=0.15, help="share of cells that are walls")
parser.add_argument("--learning_rate", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=0)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Maze:
    """A square with walls; the robot knows its cell, and how far each side is free, up to two cells."""

    def __init__(self, size, walls, seed):
        draw = np.random.default_rng(seed)
        while True:
            self.free = draw.random((size, size)) >= walls
            cells = [tuple(map(int, cell)) for cell in np.argwhere(self.free)]
            self.goal = cells[int(draw.integers(len(cells)))] if cells else (0, 0)
            self.starts = sorted(self.reachable() - {self.goal})
            if len(self.starts) > size * size // 2 * (1 - walls):
                return

    def reachable(self):
        """Return the cells from which the goal can be reached."""
        found, edge = {self.goal}, [self.goal]
        while edge:
            cell = edge.pop()
            for move in range(4):
                other = self.moved(cell, move)
                if other not in found:
                    found.add(other)
                    edge.append(other)
        return found

    def moved(self, cell, move):
        """Return the cell after a move; the robot stays where a wall is."""
        row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        inside = 0 <= row < len(self.free) and 0 <= column < len(self.free)
        return (row, column) if inside and self.free[row, column] else cell

    def sensors(self, cell):
        ahead = []
        for move in range(4):
            one = self.moved(cell, move)
            ahead.append(0 if one == cell else 1 if self.moved(one, move) == one else 2)
        return cell, tuple(ahead)


def main(arguments):
    maze = Maze(arguments.size, arguments.walls, arguments.seed)
    values, start = {}, 0
    if path := newest_checkpoint():
        with np.load(path, allow_pickle=False) as saved:
            start = int(saved["step"])
            keys = [tuple(each) for each in saved["keys"].tolist()]
            values = {((a, b), tuple(rest)): row for (a, b, *rest), row in zip(keys, saved["rows"])}
    block = max(1, arguments.episodes // 10)
    for first in range(start, arguments.episodes, block):
        for episode in range(first, min(first + block, arguments.episodes)):
            draw = np.random.default_rng((arguments.seed, episode))
            cell = maze.starts[int(draw.integers(len(maze.starts)))]
            curious = max(0.05, 1 - 1.5 * episode / arguments.episodes)
            for _ in range(4 * arguments.size):
                seen = maze.sensors(cell)
                known = values.setdefault(seen, np.zeros(4))
                move = int(draw.integers(4)) if draw.random() < curious else int(known.argmax())
                after = maze.moved(cell, move)
                reward = 1.0 if after == maze.goal else -0.05 if after == cell else -0.01
                future = 0.0 if after == maze.goal else values.get(maze.sensors(after), np.zeros(4)).max()
                known[move] += arguments.learning_rate * (reward + 0.97 * future - known[move])
                cell = after
                if cell == maze.goal:
                    break
        done, rate = min(first + block, arguments.episodes), success_rate(maze, values)
        log(done, success_rate=rate, known_situations=len(values))
        save(done, lambda path, step=done: write(path, values, step), ".npz")
    print(
        "done: reaches the goal from %.0f %% of %d cells"
        % (100 * success_rate(maze, values), len(maze.starts))
    )


def success_rate(maze, values):
    """Return from which share of all cells the robot reaches the goal."""
    reached = 0
    for cell in maze.starts:
        for _ in range(4 * len(maze.free)):
            cell = maze.moved(cell, int(values.get(maze.sensors(cell), np.zeros(4)).argmax()))
            if cell == maze.goal:
                reached += 1
                break
    return reached / len(maze.starts)


def write(path, values, step):
    with open(path, "wb") as file:
        keys = [[*cell, *ahead] for cell, ahead in values]
        np.savez(file, keys=np.array(keys), rows=np.array(list(values.values())), step=step)


if __name__ == "__main__":
    main(parser.parse_args())
