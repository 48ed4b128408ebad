"""Checkpoints and metrics by the conventions of Fairway (docs/checkpoints.md, docs/sweeps.md)."""

import os
import re


def newest_checkpoint():
    """Return the newest complete checkpoint of this job, else the one it was told to start from, else None."""
    folder = os.environ.get("FAIRWAY_CHECKPOINT_DIR", "")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = {int(match[1]): match[0] for match in map(re.compile(r"step-(\d+)\.\w+$").match, names) if match}
    complete = [step for step, name in steps.items() if name + ".complete" in names]
    return os.path.join(folder, steps[max(complete)]) if complete else os.environ.get("FAIRWAY_RESUME_FROM")


def save(step, write, suffix=".pt"):
    """Let ``write(path)`` write the checkpoint of a step; report it once it is complete."""
    folder = os.environ.get("FAIRWAY_CHECKPOINT_DIR")
    if not folder:
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "step-%d%s" % (step, suffix))
    write(path + ".tmp")
    os.replace(path + ".tmp", path)
    open(path + ".complete", "w").close()
    if "FAIRWAY_CHECKPOINT_FILE" in os.environ:
        with open(os.environ["FAIRWAY_CHECKPOINT_FILE"], "w") as report:
            report.write(str(step))


def log(step, **metrics):
    """Print and report metrics."""
    print("step", step, *("%s %.5g" % item for item in metrics.items()), flush=True)
    report(step, **metrics)


def report(step, **metrics):
    """Report metrics: the first one is the value of a trial, and all go to MLflow where it is installed."""
    if "FAIRWAY_METRIC_FILE" in os.environ:
        with open(os.environ["FAIRWAY_METRIC_FILE"], "a") as reports:
            reports.write("%d %r\n" % (step, float(next(iter(metrics.values())))))
    mlflow = current_run()
    if mlflow:
        mlflow.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)


def current_run():
    """Return mlflow with the run of this job, which a restarted job continues; None where it is not installed."""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        return None
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # the image need not have git
    try:
        import mlflow
    except ImportError:
        return None
    if mlflow.active_run() is None:
        folder = os.environ.get("FAIRWAY_CHECKPOINT_DIR")
        if not (folder and continue_run(mlflow, os.path.join(folder, ".run"))):
            mlflow.start_run()
    return mlflow


def continue_run(mlflow, path):
    """Continue the run that the file names, or start one and name it there; return False if it is gone."""
    if os.path.isfile(path):
        with open(path) as file:
            try:
                mlflow.start_run(run_id=file.read())
            except mlflow.exceptions.MlflowException:
                return False
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(mlflow.start_run().info.run_id)
    return True


def record_parameters(parameters):
    """Record parameters in the run, unless an earlier attempt did."""
    mlflow = current_run()
    if mlflow and not mlflow.get_run(mlflow.active_run().info.run_id).data.params:
        mlflow.log_params(parameters)


def store_model(path):
    """Store a file as the artifact ``model`` of the run, from which the model can be registered."""
    mlflow = current_run()
    if mlflow and path:
        mlflow.log_artifact(path, "model")
