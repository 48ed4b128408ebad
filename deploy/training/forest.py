"""scikit-learn: a random forest classifies handwritten digits; more trees are added until it stops to improve."""

import argparse
import os

import joblib
from common import log, newest_checkpoint, save
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trees", type=int, default=200)
parser.add_argument("--trees_per_step", type=int, default=20)
parser.add_argument("--max_depth", type=int, default=12)
parser.add_argument("--max_features", choices=["sqrt", "log2"], default="sqrt", help="tried at each split")


def main(arguments):
    data, digit = load_digits(return_X_y=True)
    known, test, known_digit, test_digit = train_test_split(
        data, digit, test_size=0.25, random_state=0, stratify=digit
    )
    forest = RandomForestClassifier(
        0, max_depth=arguments.max_depth, max_features=arguments.max_features, warm_start=True, random_state=0,
        n_jobs=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    if path := newest_checkpoint():
        forest = joblib.load(path)
    accuracy = 0.0
    for trees in range(
        forest.n_estimators + arguments.trees_per_step, arguments.trees + 1, arguments.trees_per_step
    ):
        forest.n_estimators = trees
        forest.fit(known, known_digit)
        accuracy = forest.score(test, test_digit)
        log(trees, accuracy=accuracy)
        save(trees, lambda path: joblib.dump(forest, path), ".joblib")
    print("done: accuracy %.3f of %d trees" % (forest.score(test, test_digit), forest.n_estimators))


if __name__ == "__main__":
    main(parser.parse_args())
