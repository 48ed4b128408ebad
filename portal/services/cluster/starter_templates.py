"""Starter templates: a small program for each launcher that runs as it is, to be replaced by one's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from portal.domain.states import JobKind
from portal.models import Template

_TORCH = """import os, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
"""
_JOIN = _TORCH + 'dist.init_process_group("nccl" if cuda else "gloo")\n'
_STEPS = """optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    data = torch.randn(64, 32, device=device)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_DATA_PARALLEL = (
    _TORCH
    + """model = torch.nn.Linear(32, 1).to(device)
model = torch.nn.DataParallel(model) if torch.cuda.device_count() > 1 else model
"""
    + _STEPS
    + 'print("done: loss", round(loss.item(), 4), "on", torch.cuda.device_count(), "GPUs")\n'
)
_DDP = (
    _JOIN
    + """from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(32, 1).to(device))
"""
    + _STEPS
    + """print("done: rank", dist.get_rank(), "of", dist.get_world_size(), "loss", round(loss.item(), 4))
dist.destroy_process_group()
"""
)
_FSDP = _DDP.replace(
    "from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"
).replace(
    "model = DistributedDataParallel(torch.nn.Linear(32, 1).to(device))",
    "model = torch.nn.Linear(32, 1).to(device)\nfully_shard(model)",
)
_PIPELINE = (
    _JOIN
    + """from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
part = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).to(device)
schedules = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
schedule = schedules[os.environ.get("SCHEDULE", "1f1b")](
    PipelineStage(part, rank, size, device), int(os.environ.get("MICRO_BATCHES", "8")),
    loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
torch.manual_seed(0)
data, target, losses = torch.randn(32, 64, device=device), torch.zeros(32, 64, device=device), []
for step in range(20):
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(data)
    elif rank == size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    optimizer.step()
print("done: stage", rank, "of", size, "loss", round(sum(map(float, losses)) / len(losses), 6) if losses else "-")
dist.destroy_process_group()
"""
)
_MIRRORED = """import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.random.normal([256, 8])
model.fit(data, tf.reduce_sum(data, 1), batch_size=32, epochs=2, verbose=2)
print("done:", strategy.num_replicas_in_sync, "replicas")
"""
_MULTI_WORKER = """import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(tf.zeros([8, 1]), aggregation=tf.VariableAggregation.MEAN)
@tf.function
def step():
    def on_replica():
        data = tf.random.normal([64, 8])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((data @ weight - tf.reduce_sum(data, 1, keepdims=True)) ** 2)
        weight.assign_sub(0.05 * tape.gradient(loss, weight))
        return loss
    return strategy.reduce("mean", strategy.run(on_replica), axis=None)
for _ in range(20):
    loss = step()
print("done:", strategy.num_replicas_in_sync, "replicas, loss", round(float(loss), 4))
"""
_PARAMETER_SERVER = """import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    spec = resolver.cluster_spec()
    server = tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc")
    import socket, time
    host, port = spec.as_dict()["chief"][0].rsplit(":", 1)
    missed = seen = 0
    while missed < 3:  # until the chief has ended
        try:
            socket.create_connection((host.strip("[]"), int(port)), 2).close()
            missed, seen = 0, 1
        except OSError:
            missed += seen
        time.sleep(1)
    import os
    os._exit(0)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(1.0)
@tf.function
def step():
    weight.assign_sub(0.01)
for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
print("done: weight", round(float(weight.numpy()), 4))
"""
_HOROVOD = """import torch, horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(32, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(20):
    data = torch.randn(64, 32)
    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done: rank", hvd.rank(), "of", hvd.size())
"""
# a collective call outside of train would meet the calls inside of the processes that run already
_HOROVOD_ELASTIC = _HOROVOD.replace("hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", "").replace(
    "for step in range(20):\n",
    "@hvd.elastic.run\ndef train(state):\n  while state.step < 200:\n    state.step += 1\n",
).replace(
    "    optimizer.step()\nprint", "    optimizer.step()\n    state.commit()\n"
    "train(hvd.elastic.TorchState(model, optimizer, step=0))\nprint",
)  # fmt: skip
_DEEPSPEED = """import torch, deepspeed
model = torch.nn.Linear(32, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_optimization": {"stage": 1}})
for step in range(20):
    data = torch.randn(8, 32, device=engine.device)
    engine.backward((engine(data) - data.sum(1, keepdim=True)).square().mean())
    engine.step()
print("done: rank", engine.global_rank)
"""
_ACCELERATE = """import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(32, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for step in range(20):
    data = torch.randn(64, 32, device=accelerator.device)
    accelerator.backward((model(data) - data.sum(1, keepdim=True)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("done: process", accelerator.process_index, "of", accelerator.num_processes)
accelerator.end_training()
"""
_JAX = """import os, jax
if "JAX_NUM_PROCESSES" in os.environ:
    jax.distributed.initialize(
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"]))
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0])).sum()
print("done: process", jax.process_index(), "of", jax.process_count(), "sum", float(total))
"""
_MPI = "echo done: rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)"
_RAY = """import ray
ray.init()
@ray.remote
def square(number):
    return number * number
print("done:", sum(ray.get([square.remote(number) for number in range(10)])), "on", len(ray.nodes()), "nodes")
"""
_SPARK = """from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession
context = SparkSession.builder.getOrCreate().sparkContext
def train(rows):
    task = BarrierTaskContext.get()
    task.barrier()
    yield task.partitionId(), sum(rows)
size = int(context.getConf().get("spark.cores.max", "2"))
print("done:", context.parallelize(range(100), size).barrier().mapPartitions(train).collect())
"""
_CUSTOM = """for host in $(echo "$HOSTS" | tr , ' '); do
  if [ "$WORLD_SIZE" -gt 1 ]; then ssh "$host" 'echo "done: rank $RANK of $WORLD_SIZE"'; fi
done"""


class StarterTemplate(NamedTuple):
    """A template without environment: users choose one with the framework."""

    name: str
    title: str
    description: str
    fields: dict[str, Any]


def _starter(
    name: str, title: str, description: str, program: str, tasks: int = 2, **fields: Any
) -> StarterTemplate:
    words = ["python", "-c", program]
    return StarterTemplate(
        name, title, description, {"command": words, "tasks": tasks, "gpus_per_task": 1, **fields}
    )


STARTER_TEMPLATES = (
    _starter("data-parallel", "PyTorch DataParallel", "One process on all GPUs of one task. DDP is usually faster.",
             _DATA_PARALLEL, tasks=1, gpus_per_task=2),
    _starter("torch-ddp", "PyTorch DDP", "A process per GPU by torchrun; gradients are averaged.",
             _DDP, launcher="torchrun"),
    _starter("torch-elastic", "PyTorch DDP, elastic", "Starts with one task; grows and shrinks while it runs.",
             _DDP, tasks=4, min_tasks=1, launcher="torchrun", launcher_options={"max_restarts": 10}),
    _starter("torch-fsdp", "PyTorch FSDP", "A process per GPU by torchrun; parameters are sharded.",
             _FSDP, launcher="torchrun"),
    _starter("torch-pipeline", "PyTorch pipeline", "A stage per GPU; SCHEDULE is gpipe or 1f1b.",
             _PIPELINE, launcher="torchrun", env={"SCHEDULE": "1f1b", "MICRO_BATCHES": "8"}),
    _starter("tf-mirrored", "Keras, one task", "MirroredStrategy on all GPUs of one task.",
             _MIRRORED, tasks=1, gpus_per_task=2,
             launcher="tensorflow", launcher_options={"strategy": "mirrored"}),
    _starter("tf-multi-worker", "TensorFlow, several workers", "MultiWorkerMirroredStrategy by TF_CONFIG.",
             _MULTI_WORKER, launcher="tensorflow"),
    _starter("tf-parameter-server", "TensorFlow parameter server", "A chief, a parameter server and two workers.",
             _PARAMETER_SERVER, tasks=4, launcher="tensorflow",
             launcher_options={"strategy": "parameter_server"}),
    _starter("horovod", "Horovod", "horovodrun with Gloo, a process per GPU.", _HOROVOD, launcher="horovod"),
    _starter("horovod-elastic", "Horovod, elastic", "horovodrun with the hosts that run now.",
             _HOROVOD_ELASTIC, tasks=4, min_tasks=1, launcher="horovod"),
    _starter("deepspeed", "DeepSpeed", "ZeRO stage 1, a process per GPU.", _DEEPSPEED, launcher="deepspeed"),
    _starter("accelerate", "Accelerate", "accelerate launch, a process per GPU.",
             _ACCELERATE, launcher="accelerate"),
    _starter("jax", "JAX", "jax.distributed, one process per task.", _JAX, launcher="jax"),
    _starter("mpi", "MPI", "mpirun of Open MPI, a process per GPU.", "", launcher="mpi",
             command=["sh", "-c", _MPI]),
    _starter("ray", "Ray", "A Ray cluster for the job; the program runs on its head.", _RAY, launcher="ray"),
    _starter("spark", "Spark, barrier mode", "A Spark cluster for the job: a driver and two executors.",
             _SPARK, tasks=3, launcher="spark"),
    _starter("custom", "Your own launcher", "HOSTS, a hostfile and SSH between the tasks.", "",
             launcher="custom", command=["sh", "-c", _CUSTOM]),
)  # fmt: skip


def ensure_starter_templates() -> None:
    """Create the starter templates that do not exist; existing ones keep their changes."""
    Template.objects.bulk_create(
        [Template(**each._asdict(), kind=JobKind.TRAINING.value) for each in STARTER_TEMPLATES],
        ignore_conflicts=True,
    )
