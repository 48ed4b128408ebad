"""Gangs on pages: the launcher of a request, what network it finds, and the switch that lends it."""

from __future__ import annotations

from django.urls import reverse

from portal.models import Job, Node, NodePool
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_job
from tests.web.test_nonsense import NONSENSE

TWO = {
    "time_limit_s": "",
    "tasks": "2",
    "gpus_per_task": "2",
    "launcher": "torchrun",
    "retry_on": ["command_failure"],
    "retry_exit_codes": "1, 134",
}


def test_a_launcher_without_a_network_is_refused_with_a_remedy(dataset, client_of, typed) -> None:
    asked = typed | TWO | {"pool": dataset.pools["h200"].public_id}
    reported = client_of("member").post(reverse("launch-check"), asked).content.decode()
    assert "the pool h200 allows gangs no network between nodes" in reported
    assert 'data-set="tasks=1;gpus_per_task=4;launcher=torchrun"' in reported
    refused = client_of("member").post(reverse("launch"), asked)
    assert refused.status_code == 422 and not Job.objects.filter(name="my run").exists()

    allowed_folder = client_of("admin").post(
        reverse("set-pool-network", args=[dataset.pools["h200"].public_id]),
        {"allow_host_network": "on", "fabric_devices": "/dev/infiniband/uverbs0\n/dev/infiniband/uverbs1\n"},
    )
    assert allowed_folder.status_code == 302
    pool = NodePool.objects.get(name="h200")
    assert pool.fabric_devices == ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    reported = client_of("member").post(reverse("launch-check"), asked).content.decode()
    assert "its tasks use the host network" in reported
    assert client_of("member").post(reverse("launch"), asked).status_code == 302
    job = Job.objects.get(name="my run")
    assert (job.launcher, job.retry_on, job.tasks) == ("torchrun", ["command_failure"], 2)
    assert job.retry_exit_codes == [1, 134]
    again = LaunchForm(
        job.owner,
        {key: value for key, value in initial_from_job(job.owner, job).items() if value is not None},
    )
    assert again.is_valid(), again.errors
    repeated = again.to_job_request()
    assert (repeated.launcher, repeated.retry_on) == ("torchrun", ["command_failure"])
    assert repeated.retry_exit_codes == [1, 134]


def test_only_administrators_lend_the_network(dataset, client_of) -> None:
    address = reverse("set-pool-network", args=[dataset.pools["h200"].public_id])
    for who in ("member", "stranger"):
        answer = client_of(who).post(address, {"allow_host_network": "on"})
        assert answer.status_code in (403, 404)
    assert not NodePool.objects.filter(allow_host_network=True).exists()


def test_the_fabric_of_a_pool_is_in_its_form_and_missing_interfaces_are_reported(dataset, client_of) -> None:
    pool = dataset.pools["h200"]
    address, policy = reverse("set-pool-network", args=[pool.public_id]), f"{reverse('policy')}?pool=h200"
    node = pool.nodes.order_by("name").first()
    Node.objects.filter(pk=node.pk).update(
        agent_info=node.agent_info
        | {"interfaces": [{"name": "eth0", "address": "192.0.2.1", "chosen": True}]}
    )
    named = {"allow_host_network": "on", "fabric_interface": "ib0", "fabric_adapters": "mlx5_0"}
    assert client_of("admin").post(address, named).status_code == 302
    pool.refresh_from_db()
    assert (pool.fabric_interface, pool.fabric_adapters) == ("ib0", "mlx5_0")
    page = client_of("admin").get(policy).content.decode()
    assert 'value="ib0"' in page and "It has no interface ib0." in page
    said = client_of("admin").get(reverse("node", args=[node.public_id])).content.decode()
    assert "It has no interface ib0." in said and "as set for its pool: ib0" in said
    reported = (
        client_of("admin").post(address, named | {"fabric_network": "host"}, follow=True).content.decode()
    )
    assert "name of a container network" in reported
    pool.refresh_from_db()
    assert pool.fabric_network == ""


def test_an_invalid_fabric_is_refused(dataset, client_of) -> None:
    pool, client = dataset.pools["h200"], client_of("admin")
    address = reverse("set-pool-network", args=[pool.public_id])
    names = ("fabric_interface", "fabric_network", "fabric_devices", "fabric_adapters")
    for number, text in enumerate((*NONSENSE, "1/" + "9" * 500, "::/0/1", "/dev/[")):
        for typed in (dict.fromkeys(names, text), {names[number % 4]: text}):
            assert client.post(address, {"allow_host_network": "on"} | typed).status_code == 302
    reported = client.get(f"{reverse('policy')}?pool=h200")
    assert reported.status_code == 200 and b"<script>alert(1)" not in reported.content
    pool.refresh_from_db()
    assert (pool.fabric_network, pool.fabric_devices) == ("", [])
