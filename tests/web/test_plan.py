"""Pipeline plans on pages and in REST: profiles are stored, plans compared, launched and measured."""

from __future__ import annotations

import datetime as dt
import json
import math
import re

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse
from django.utils import timezone

from portal.models import (
    Attempt,
    AttemptProgress,
    AuditEntry,
    Job,
    LayerProfile,
    Node,
    NodeLink,
    NodePool,
    PipelinePlan,
    Template,
    Topology,
)
from portal.selectors.nodes.free_nodes import plan_nodes
from portal.services.jobs.launching import preview_ranks
from portal.services.jobs.logs import write_log_bytes
from portal.services.lifecycle.job_control import RankPlacement, start_attempt
from portal.web.jobs.launch.initial_values import initial_from_job
from scheduler.pipeline_plans import answer_plan_query, store_measured_profiles
from tests import factories
from tests.factories import LAYERS, layer_profile, pipeline_plan


def words(answer) -> str:
    text = re.sub(r"<[^>]+>", " ", answer.content.decode().replace("&nbsp;", " ").replace("\u00a0", " "))
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def engine(monkeypatch) -> None:
    """The scheduler's answers, without the way to it: a query cannot be read within a test's transaction."""
    monkeypatch.setattr(
        "portal.services.jobs.pipeline_plans.query_profile",
        lambda content: answer_plan_query("profile", {"profile": content}),
    )
    monkeypatch.setattr(
        "portal.services.jobs.pipeline_plans.query_plan",
        lambda profile, levels, memory_bytes: answer_plan_query(
            "plan", {"profile": profile, "levels": levels, "memory_bytes": memory_bytes}
        ),
    )


@pytest.fixture
def profile(dataset) -> LayerProfile:
    return layer_profile(dataset.people["m-okafor"], dataset.projects["vision"])


def upload(dataset, content: str) -> dict:
    file = SimpleUploadedFile("profile.json", content.encode(), "application/json")
    return {"new-project": dataset.projects["vision"].public_id, "new-name": "mlp", "new-profile": file}


def topology(stored: LayerProfile, **changed: str) -> dict[str, str]:
    given = {
        "profile": stored.public_id, "nodes": "2", "gpus_per_node": "2", "node_gb": "25", "link_gb": "1.5",
    }  # fmt: skip
    return {f"plan-{name}": value for name, value in (given | changed).items()}


def test_a_profile_is_stored_planned_and_launched(dataset, client_of):
    client = client_of("member")
    assert "No profile yet" in words(client.get(reverse("plans")))
    answer = client.post(reverse("create-profile"), upload(dataset, json.dumps(LAYERS)))
    row = LayerProfile.objects.get()
    assert answer.url == f"/plan/?profile={row.public_id}"
    assert (row.batch_size, len(row.layers), row.project.name) == (32, 6, "vision")
    answer = client.post(reverse("create-plan"), topology(row))
    plan = PipelinePlan.objects.get()
    assert answer.url == reverse("plan", args=[plan.public_id])
    assert (plan.nodes, plan.node_bandwidth, plan.link_bandwidth) == (2, 25e9, 1.5e9)
    assert [entry.action for entry in AuditEntry.objects.order_by("id")][-2:] == [
        "profile.create",
        "plan.create",
    ]
    page = words(client.get(f"{answer.url}?choice=straight&m=8"))
    assert "Straight pipeline 1-1-1-1 4 stages" in page
    assert "the bubble is 27.3 % of the step" in page
    assert "Chosen: 1-1-1-1" in page
    launch = client.get(reverse("launch"), {"plan": plan.public_id, "choice": "straight", "m": "8"})
    form = launch.context["form"]
    assert (form.initial["tasks"], form.initial["gpus_per_task"], form.initial["launcher"]) == (
        2,
        2,
        "torchrun",
    )
    assert form.initial["project"] == row.project.public_id
    env = dict(line.split("=", 1) for line in form.initial["env"].splitlines())
    assert env["PIPELINE_PLAN_ID"] == plan.public_id
    split = json.loads(env["PIPELINE_PLAN"])
    assert (split["ranks"], split["micro_batches"], split["schedule"]) == ([[0], [1], [2], [3]], 8, "1f1b")
    assert split["stages"][0][0] == 0 and split["stages"][-1][1] == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "The profile is not JSON"),
        ('{"nodes": NaN}', "The profile has the value NaN"),
        ('{"nodes": [], "nodes": []}', "the key &#x27;nodes&#x27; twice"),
        (json.dumps(LAYERS | {"batch_size": 10**400}), "a number of 401 digits"),
        ("node1 -- Linear -- colour=1", "Line 1 has the unknown value &#x27;colour&#x27;"),
        (json.dumps(LAYERS | {"totals": 7}).replace("7", "1e400"), "1e400, which is too large"),
        (json.dumps(LAYERS | {"edges": []}), "has no edge"),
        (json.dumps(LAYERS | {"colour": 1}), "The profile has the unknown key &#x27;colour&#x27;"),
        (json.dumps(LAYERS | {"edges": [["1", "1"]]}), "The edges form a cycle"),
        (" " * 1_100_000, "A profile has at most 1024 KiB"),
    ],
)
def test_a_profile_that_cannot_be_read_is_refused_with_the_reason(dataset, client_of, content, message):
    answer = client_of("member").post(reverse("create-profile"), upload(dataset, content))
    assert answer.status_code == 400
    assert message in words(answer)
    assert not LayerProfile.objects.exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": "0"}, "greater than or equal to 1"),
        ({"link_gb": ""}, "no link of the pool is measured"),
        ({"link_gb": "1e9"}, "between 1e+06 and 1e+13 bytes per second"),
        ({"profile": "unknown"}, "Select a valid choice"),
    ],
)
def test_a_topology_that_is_wrong_is_refused_with_the_reason(profile, client_of, changed, message):
    answer = client_of("member").post(reverse("create-plan"), topology(profile, **changed))
    assert answer.status_code == 400
    assert message in words(answer)
    assert not PipelinePlan.objects.exists()


def test_without_the_scheduler_nothing_is_stored(profile, client_of, monkeypatch):
    monkeypatch.setattr("portal.services.jobs.pipeline_plans.query_plan", lambda *_: None)
    answer = client_of("member").post(reverse("create-plan"), topology(profile))
    assert "The scheduler does not answer" in words(answer)
    assert not PipelinePlan.objects.exists()


def test_the_memory_of_the_pools_gpus_limits_a_plan(dataset, profile, client_of):
    pool = dataset.jobs["vit-h-pretrain"].attempts.get().pool
    client = client_of("member")
    assert client.post(reverse("create-plan"), topology(profile, pool=pool.public_id)).status_code == 302
    assert PipelinePlan.objects.get().memory_bytes > 0
    profile.content = LAYERS | {"nodes": [node | {"parameter_bytes": 1e15} for node in LAYERS["nodes"]]}
    profile.save()
    answer = client.post(reverse("create-plan"), topology(profile, pool=pool.public_id))
    assert "bytes per GPU" in words(answer)


def test_the_slowest_measured_link_of_the_pool_is_the_bandwidth_between_nodes(dataset, profile, client_of):
    pool = dataset.jobs["vit-h-pretrain"].attempts.get().pool
    one, other, third = pool.nodes.order_by("pk")[:3]
    for node, mib_per_s in ((other, 2000.0), (third, 1000.0)):
        NodeLink.objects.create(node_a=one, node_b=node, mib_per_s=mib_per_s, measured_at=timezone.now())
    answer = client_of("member").post(
        reverse("create-plan"), topology(profile, pool=pool.public_id, link_gb="")
    )
    assert answer.status_code == 302
    assert PipelinePlan.objects.get().link_bandwidth == 1000 * 1024 * 1024


def test_predicted_and_measured_rates_are_shown_side_by_side(dataset, profile, client_of):
    plan, client = pipeline_plan(profile), client_of("member")
    address, rest = reverse("plan", args=[plan.public_id]), f"/api/v1/plans/{plan.public_id}/"
    assert "No job was launched" in words(client.get(address))
    form = client.get(reverse("launch"), {"plan": plan.public_id, "choice": "straight", "m": "4"}).context[
        "form"
    ]
    env = dict(line.split("=", 1) for line in form.initial["env"].splitlines())
    owner, environment = dataset.people["m-okafor"], dataset.environments["batch"]
    job = Job.objects.create(
        project=profile.project,
        owner=owner,
        environment=environment,
        name="piped",
        env=env,
        state="COMPLETED",
    )
    other = Job.objects.create(
        project=profile.project, owner=owner, environment=environment, name="unplanned", state="COMPLETED"
    )
    assert "not yet" in words(client.get(address))
    now = timezone.now()
    attempt = Attempt.objects.create(
        job=job, number=1, pool=dataset.jobs["vit-h-pretrain"].attempts.get().pool, leader_epoch=1,
        state="COMPLETED", ended_at=now,
    )  # fmt: skip
    AttemptProgress.objects.create(
        attempt=attempt, rank=0, start_units=0, start_at=now - dt.timedelta(seconds=100), completed_units=250_000,
        reported_at=now, workload_fingerprint="x", gpus=2, gpu_model="H200", nodes=1, islands=1, levels=0,
    )  # fmt: skip
    (run,) = client.get(rest).json()["runs"]
    # six layers of 3 ms on two GPUs: 32 samples in 9 ms; with four micro-batches 4 of 5 parts are used
    predicted = 32 / 0.009 * 4 / 5
    assert (run["job"]["name"], run["micro_batches"]) == ("piped", 4)
    assert run["predicted_per_s"] == pytest.approx(predicted)
    assert run["error_percent"] == pytest.approx(100 * (2500 / predicted - 1))
    to_division = client.get(address, {"job": job.public_id})
    assert to_division.status_code == 302 and "&m=4&schedule=1f1b" in to_division["Location"]
    assert client.get(to_division["Location"]).status_code == 200
    assert client.get(address, {"job": other.public_id}).status_code == 200
    page = words(client.get(address))
    assert "2,844.4" in page and "2,500.0" in page and "-12.1 %" in page
    # PipeDream does not empty the pipeline: without a bubble
    job.env |= {"PIPELINE_PLAN": job.env["PIPELINE_PLAN"].replace("1f1b", "pipedream")}
    job.save()
    (run,) = client.get(rest).json()["runs"]
    assert (run["schedule"], run["predicted_per_s"]) == ("pipedream", pytest.approx(32 / 0.009))
    huge = '{"micro_batches": 1e%s, "schedule": ""}'
    for typed in ("[" * 20_000, huge % 400, huge % 300, "{}"):  # its variables are text of its owner
        job.env |= {"PIPELINE_PLAN": typed}
        job.save()
        assert client.get(rest).json()["runs"][0]["predicted_per_s"] is None
        assert "another division" in words(client.get(address))
    assert other.name not in words(client.get(address)) and "Measured:" not in words(client.get(address))
    served = Job.objects.create(
        project=profile.project, owner=owner, environment=environment, name="served", env=job.env,
        state="COMPLETED", launcher="tensorflow", launcher_options={"strategy": "parameter_server"},
        gpus_per_task=plan.nodes * plan.gpus_per_node,
    )  # fmt: skip
    Job.objects.filter(pk=job.pk).update(gpus_per_task=plan.nodes * plan.gpus_per_node, tasks=1)
    ended = {"pool": attempt.pool, "leader_epoch": 1, "state": "COMPLETED", "ended_at": now}
    AttemptProgress.objects.create(
        attempt=Attempt.objects.create(job=served, number=1, **ended), rank=0, start_units=0,
        start_at=now - dt.timedelta(seconds=100), completed_units=100_000, reported_at=now,
        workload_fingerprint="x", gpus=2, gpu_model="H200", nodes=1, islands=1, levels=0,
        launcher="tensorflow parameter_server",
    )  # fmt: skip
    measured = (
        "Measured: none 2,500.0 samples/s (1 run), tensorflow parameter_server 1,000.0 samples/s (1 run)."
    )
    assert measured in words(client.get(address))


@pytest.mark.parametrize(
    ("schedule", "bubble", "memory", "hint"),
    [
        # two stages with 60 MiB of weights and 12 MiB of activations each, 4 micro-batches
        ("1f1b", "20.0", "84 MiB", "fewer micro-batches in flight"),
        ("gpipe", "20.0", "108 MiB", "need the most memory"),
        ("pipedream", "0.0", "144 MiB", "up to 2 versions"),
        ("unknown", "20.0", "84 MiB", "fewer micro-batches in flight"),
    ],
)
def test_memory_and_bubble_are_those_of_the_schedule(
    profile, client_of, schedule, bubble, memory, hint
) -> None:
    mib = 1024 * 1024
    nodes = [node | {"parameter_bytes": 20 * mib, "activation_bytes": 4 * mib} for node in LAYERS["nodes"]]
    content = LAYERS | {"nodes": nodes}
    plan = pipeline_plan(profile)
    plan.answer = answer_plan_query("plan", {"profile": content, "levels": [(2, 1e9)], "memory_bytes": None})
    plan.save()
    given = {"choice": "straight", "m": "4", "schedule": schedule}
    page = words(client_of("member").get(reverse("plan", args=[plan.public_id]), given))
    assert f"the bubble is {bubble} % of the step" in page
    (straight,) = re.findall(r"Straight pipeline 1-1 2 stages .*? % (\d+ MiB)", page)
    assert straight == memory and hint in page
    launch = client_of("member").get(reverse("launch"), {"plan": plan.public_id, **given})
    chosen = "1f1b" if schedule == "unknown" else schedule
    assert f'"schedule":"{chosen}"' in launch.context["form"].initial["env"]


def test_the_page_draws_one_step_and_the_bubbles_of_other_sizes(profile, client_of):
    plan, client = pipeline_plan(profile), client_of("member")
    address = reverse("plan", args=[plan.public_id])
    page = words(client.get(address, {"choice": "straight", "m": "4"}))
    assert (
        "Timeline of one step" in page and "4 micro-batches: the stages are idle 20.0 % of the step." in page
    )
    assert "64 micro-batches 1.5 % bubble" in page and "Between nodes" not in page
    many = words(client.get(address, {"choice": "straight", "m": "40"}))
    assert "Drawn with 16 of 40 micro-batches" in many
    assert client.get(reverse("plan-json", args=[plan.public_id])).json() == plan.answer
    for query in ({"choice": "data_parallel"}, {"choice": "straight", "schedule": "pipedream"}):
        assert "Timeline of one step" not in words(client.get(address, query))


def test_the_page_shows_what_goes_between_nodes(profile, client_of):
    plan = pipeline_plan(profile, nodes=2, gpus_per_node=1, link_bandwidth=1e9)
    client, address = client_of("member"), reverse("plan", args=[plan.public_id])
    page = words(client.get(address, {"choice": "straight", "m": "4"}))
    # 1 MB of activations in both directions; 111 minibatches per second, of which the bubble leaves 4 of 5
    assert "2 MiB a micro-batch" in page and "23 MiB of gradients a step" in page
    assert "0.178 GB/s of activations between them, 18 % of 1 GB/s" in page
    rows = client.get(address, {"sort": "memory"}).context["rows"]
    amounts = [one.memory_mib for one in rows if one.plan]
    assert amounts == sorted(amounts)


def test_a_plan_with_unequal_replicas_is_launched(profile, client_of):
    profile.content["nodes"][0]["fwd_ms"] = 10.0
    plan, client = pipeline_plan(profile, gpus_per_node=3), client_of("member")
    levels = {"profile": profile.content, "levels": [(3, 1e9)], "memory_bytes": None}
    plan.answer = answer_plan_query("plan", levels)
    plan.save()
    assert plan.answer["config"] == "2-1"
    launch = client.get(reverse("launch"), {"plan": plan.public_id, "choice": "best", "m": "4"})
    form = launch.context["form"]
    env = dict(line.split("=", 1) for line in form.initial["env"].splitlines())
    assert json.loads(env["PIPELINE_PLAN"])["ranks"] == [[0, 1], [2]]
    assert form.initial["command"] == 'python "$FAIRWAY_SECRETS/train_pipeline.py"'


def test_a_plan_prefers_the_nodes_that_its_page_draws(dataset, profile, client_of):
    """Of the free nodes those of one rack are drawn, and the job that is launched prefers them."""
    pool, client = factories.pool(), client_of("member")
    Topology.objects.create(name="a-fabric", levels=["rack"])
    _, *near = [
        factories.node(pool, gpus=gpus, labels={"rack": rack}).name
        for gpus, rack in ((4, "b"), (2, "a"), (2, "a"))
    ]
    plan = pipeline_plan(profile, pool, nodes=2, gpus_per_node=1, link_bandwidth=1e9)
    text = words(client.get(reverse("plan", args=[plan.public_id])))
    assert "A job that you launch now prefers these nodes." in text
    given = {"plan": plan.public_id, "choice": "best", "m": "4"}
    form = client.get(reverse("launch"), given).context["form"]
    assert form.initial["preferred_nodes"] == " ".join(sorted(near))
    assert form.initial["pool"] == pool.public_id
    Node.objects.filter(name=near[0]).update(slow_network=True)
    assert near[0] not in [one.name for one in plan_nodes(dataset.people["m-okafor"], plan)]
    plan = pipeline_plan(profile, pool, nodes=60, gpus_per_node=1, link_bandwidth=1e9)
    assert "must become free" in words(client.get(reverse("plan", args=[plan.public_id])))
    form = client.get(reverse("launch"), given | {"plan": plan.public_id}).context["form"]
    assert not form.initial.get("preferred_nodes")


def test_a_plan_is_saved_as_a_template_that_launches_it(dataset, profile, client_of):
    pool, client = factories.pool(), client_of("member")
    factories.node(pool, gpus=2)
    plan = pipeline_plan(profile, pool)
    given = {"choice": "straight", "m": "4", "schedule": "gpipe"}
    page = client.get(reverse("plan", args=[plan.public_id]), given)
    address = f"{reverse('new-template')}?{page.context['launch_query']}"
    assert address.replace("&", "&amp;") in page.content.decode()
    initial = client.get(address).context["form"].initial
    typed = {name: value for name, value in initial.items() if name != "enabled"} | {"enabled": "on"}
    typed |= {"category": "other"}
    project = {"scope": "project", "project": profile.project.public_id}
    for changes, message in [
        ({"name": "Not valid"}, "lower-case letters"),
        ({"scope": "everyone"}, "Select a valid choice"),
        ({"scope": "project"}, "Name the project with which it is shared"),
        (project | {"project": dataset.projects["robotics"].public_id}, "Select a valid choice"),
    ]:
        refused = client.post(reverse("new-template"), typed | changes)
        assert refused.status_code == 400 and message in refused.content.decode(), message
    saved = client.post(reverse("new-template"), typed | project, follow=True)
    template = Template.objects.get(name=initial["name"])
    assert (template.scope, template.project) == ("project", profile.project)
    assert f"{template.title} is saved as version 1." in words(saved)
    assert saved.redirect_chain[0][0].endswith(f"?template={template.public_id}")
    from_plan = client.get(f"{reverse('launch')}?{page.context['launch_query']}").context["form"].initial
    from_template = client.get(reverse("launch"), {"template": template.public_id}).context["form"].initial
    for name in ("command", "tasks", "gpus_per_task", "launcher"):
        assert from_template[name] == from_plan[name], name
    assert set(from_template["env"].splitlines()) == set(from_plan["env"].splitlines())
    assert from_plan["preferred_nodes"] and "preferred_nodes" not in template.fields
    assert '"schedule":"gpipe"' in template.fields["env"]["PIPELINE_PLAN"]
    assert client.get(address.replace("straight", "none")).status_code == 404
    assert client_of("stranger").get(address).status_code == 404


def test_a_measured_profile_names_model_and_input_of_the_run(profile, client_of):
    profile.content |= {"model": "models:mlp", "input": [32, 64]}
    profile.save()
    plan = pipeline_plan(profile)
    given = {"plan": plan.public_id, "choice": "straight", "m": "4"}
    form = client_of("member").get(reverse("launch"), given).context["form"]
    assert form.initial["command"].endswith('train_pipeline.py" --model models:mlp --input 128,64')
    profile.content |= {"input": ["a", 64]}
    profile.save()
    form = client_of("member").get(reverse("launch"), given).context["form"]
    assert form.initial["command"].endswith('train_pipeline.py"')


@pytest.fixture
def profile_job(dataset, client_of, typed) -> Job:
    client = client_of("member")
    page = client.get(reverse("launch"), {"profile": "mlp 32", "model": "models:mlp", "input": "32,64"})
    filled = {
        name: page.context["form"].initial[name] for name in ("name", "env", "command", "gpus_per_task")
    }
    assert client.post(reverse("launch"), typed | filled).status_code == 302
    return Job.objects.get(name="profile-mlp-32")


def finish(job: Job, log: str, state: str = "COMPLETED") -> None:
    node = Node.objects.select_related("pool").first()
    attempt = start_attempt(job, node.pool, [RankPlacement(node, ())], epoch=1, secret=b"")
    write_log_bytes(job.public_id, 1, 0, "raw", 0, log.encode())
    attempt.task_rows.update(log_complete=True)
    Job.objects.filter(pk=job.pk).update(state=state, ended_at=timezone.now())


def test_the_result_of_a_profile_job_is_stored_when_it_ends(
    dataset, client_of, profile_job, settings, tmp_path
):
    settings.LOG_DIR = tmp_path
    ranks = preview_ranks(profile_job, 1)
    assert "profile_layers.py" in ranks[0].files
    assert "$FAIRWAY_SECRETS/profile_layers.py" in " ".join(ranks[0].command)
    assert "models:mlp --input 32,64 --output -" in " ".join(ranks[0].command)
    store_measured_profiles()
    assert "Profile jobs" in words(client_of("member").get(reverse("plans")))
    assert "Profile jobs" not in words(client_of("stranger").get(reverse("plans")))
    finish(profile_job, f"measured layer 1 of 6\n{json.dumps(LAYERS)}\nbye\n")
    store_measured_profiles()
    store_measured_profiles()
    row = LayerProfile.objects.get()
    assert (row.name, len(row.layers), row.created_by) == ("mlp 32", 6, dataset.people["m-okafor"])
    assert AuditEntry.objects.order_by("id").last().action == "profile.create"
    page = words(client_of("member").get(reverse("plans")))
    assert "mlp 32" in page and "Profile jobs" not in page


@pytest.mark.parametrize(
    ("log", "state", "message"),
    [
        ("measured layer 1 of 6", "FAILED", "The job is FAILED and its log has no profile."),
        ("no JSON here", "COMPLETED", "The job is COMPLETED and its log has no profile."),
        ('{"nodes": []}', "COMPLETED", "has no layers"),
        ('{"nodes": [1', "COMPLETED", "its log has no profile"),
        (json.dumps(LAYERS | {"totals": {"x": math.inf}}), "COMPLETED", "numbers must be finite"),
        (json.dumps(LAYERS | {"totals": 7}).replace("7", "1e400"), "COMPLETED", "1e400, which is too large"),
        (json.dumps(LAYERS | {"source": "a\0"}), "COMPLETED", "a character that cannot be stored"),
        (json.dumps(LAYERS | {"source": "a\ud800"}), "COMPLETED", "a character that cannot be stored"),
    ],
)
def test_a_profile_job_without_a_result_has_a_reason(
    client_of, profile_job, settings, tmp_path, log, state, message
):
    settings.LOG_DIR = tmp_path
    finish(profile_job, log, state)
    store_measured_profiles()
    assert not LayerProfile.objects.exists()
    assert message in words(client_of("member").get(reverse("plans")))


def test_members_delete_profiles_and_strangers_do_not_see_them(profile, client_of):
    pipeline_plan(profile)
    address = reverse("delete-profile", args=[profile.public_id])
    assert client_of("stranger").post(address).status_code == 404
    assert "mlp" not in words(client_of("stranger").get(reverse("plans")))
    assert client_of("member").post(address).status_code == 302
    assert not LayerProfile.objects.exists() and not PipelinePlan.objects.exists()


def test_rest_stores_a_profile_and_computes_a_plan(dataset, client_of):
    client = client_of("member")

    def post(path: str, body: dict):
        return client.post(f"/api/v1/{path}/", body, content_type="application/json")

    huge = post("profiles", {"project": "vision", "name": "mlp", "profile": LAYERS | {"batch_size": 10**400}})
    assert huge.status_code == 422 and "batch_size is a number above 1e18" in huge.content.decode()
    both = post("profiles", {"project": "vision", "name": "mlp", "profile": LAYERS, "graph": "a"})
    assert both.status_code == 422 and "either profile or graph" in both.content.decode()
    wrong = post("profiles", {"project": "vision", "name": "mlp", "profile": {"nodes": []}})
    assert wrong.status_code == 422 and "has no layers" in wrong.content.decode()
    stored = post("profiles", {"project": "vision", "name": "mlp", "profile": LAYERS})
    assert stored.status_code == 201 and len(stored.json()["layers"]) == 6
    body = {"profile": stored.json()["id"], "gpus_per_node": 2, "node_bandwidth": 1e10}
    plan = post("plans", body)
    assert plan.status_code == 201
    assert plan.json()["plans"]["alternatives"]["straight"]["config"] == "1-1"
    assert post("plans", body | {"nodes": 2}).status_code == 422
    assert post("plans", body | {"memory_bytes": 10.0}).status_code == 422


GRAPH = "\n".join(
    [
        *(
            f"node{number} -- Linear -- forward_compute_time=1.000, backward_compute_time={number % 3}.000, "
            f"activation_size=1000.0, parameter_size={4000 * number}.000"
            for number in range(600)
        ),
        *(f"\tnode{number} -- node{number + 1}" for number in range(599)),
    ]
)


def test_a_deep_graph_of_pipedream_is_stored_planned_and_said_to_be_merged(dataset, client_of):
    client = client_of("member")
    client.post(reverse("create-profile"), upload(dataset, GRAPH))
    row = LayerProfile.objects.get()
    assert len(row.layers) == 600
    answer = client.post(reverse("create-plan"), topology(row))
    page = words(client.get(answer.url))
    assert "600 layers" in page and "Planned as 400 layers: the smallest neighbors are merged." in page
    assert PipelinePlan.objects.get().answer["stages"][-1]["layers"][1] == 600
    short = "\n".join([*GRAPH.splitlines()[:3], "\tnode0 -- node1", "\tnode1 -- node2"])
    body = {"project": "vision", "name": "by REST", "graph": short}
    stored = client.post("/api/v1/profiles/", body, content_type="application/json")
    assert stored.status_code == 201 and len(stored.json()["layers"]) == 3


def test_the_programs_can_be_downloaded(client_of):
    answer = client_of("member").get(reverse("plan-program", args=["profile_layers.py"]))
    assert b"torch.nn.Sequential" in b"".join(answer.streaming_content)
    assert client_of("member").get(reverse("plan-program", args=["settings.py"])).status_code == 404


def test_preferred_nodes_are_checked_submitted_and_reported(dataset, client_of, typed):
    """Form and REST; the timeline says whether the job started on them."""
    client, pool, other = client_of("member"), dataset.pools["h200"], dataset.pools["a100"]
    NodePool.objects.update(allow_host_network=True)
    names = list(pool.nodes.order_by("name").values_list("name", flat=True)[:2])
    body = {
        "name": "pinned", "project": "vision", "environment": dataset.environments["batch"].name, "tasks": 2,
        "gpus_per_task": 1, "command": ["true"], "pool": pool.name, "preferred_nodes": names,
    }  # fmt: skip

    def refused(**changed: object) -> str:
        answer = client.post("/api/v1/jobs/", body | changed, content_type="application/json")
        assert answer.status_code == 422, answer.content
        return answer.content.decode()

    assert "for each of the 2 tasks; there are 1 names" in refused(preferred_nodes=names[:1])
    assert "no node missing" in refused(preferred_nodes=[names[0], "missing"])
    assert "request this pool, too" in refused(pool=None)
    away = other.nodes.values_list("name", flat=True).first()
    assert "different pools" in refused(preferred_nodes=[names[0], away])
    sent = client.post("/api/v1/jobs/", body, content_type="application/json")
    assert sent.status_code == 201 and sent.json()["preferred_nodes"] == names
    filled = {"pool": pool.public_id, "tasks": "2", "gpus_per_task": "1", "preferred_nodes": ", ".join(names)}
    review = client.post(reverse("launch-check"), typed | filled)
    assert f"preferred_nodes: - {' - '.join(names)}" in " ".join(words(review).split())
    assert client.post(reverse("launch"), typed | filled).status_code == 302
    job = Job.objects.get(name="my run")
    assert job.preferred_nodes == names and initial_from_job(job.owner, job)["preferred_nodes"] == " ".join(
        names
    )
    first, second = (Node.objects.get(name=name) for name in names)
    job.tasks = 2
    start_attempt(job, pool, [RankPlacement(first, ()), RankPlacement(second, ())], epoch=1, secret=b"")
    page = words(client.get(reverse("job", args=[job.public_id])))
    assert f"Starting on {names[0]}, {names[1]}, as preferred." in page
    late = Job.objects.get(name="pinned")
    start_attempt(late, pool, [RankPlacement(second, ()), RankPlacement(second, ())], epoch=1, secret=b"")
    page = words(client.get(reverse("job", args=[late.public_id])))
    assert f"Starting on {names[1]}; its preferred nodes {names[0]}, {names[1]} could not take all" in page
