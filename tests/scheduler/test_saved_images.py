"""A running job is saved as an environment by a real node, and a job of it runs there."""

from __future__ import annotations

from pathlib import Path

import pytest

from portal.models import ImagePresence, SavedImage, Task
from portal.services.workspaces.saved_images import do_save_environment_of
from tests import factories
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rig, pytest.mark.long]


def test_a_job_of_a_saved_environment_finds_what_was_installed(
    make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path
) -> None:
    made = two_rig_nodes(
        make_rig, rig_cluster, tiny_image, [[tiny_image.store], [tiny_image.store]], settings, tmp_path
    )
    program = "import time; open('/tmp/installed', 'w').write('x'); time.sleep(90)"
    job = submit(made, "python3", "-c", program)
    wait_until(made, Task.objects.filter(attempt__job=job, state="RUNNING").exists, job)
    task = Task.objects.select_related("node").get(attempt__job=job)
    machine = next(each for each in made["machines"] if each.name == task.node.name)
    wait_until(made, lambda: "/tmp/installed" in machine.podman("diff", task.container), job)
    row = do_save_environment_of(made["owner"], job, name="with-more", purpose="A test.")
    saved = SavedImage.objects.filter(pk=row.pk)
    wait_until(made, saved.filter(finished_at__isnull=False).exists, job)
    row = saved.get()
    assert (row.problem, row.environment.enabled) == ("", True)
    new = factories.job(
        made["owner"],
        made["project"],
        row.environment,
        command=["test", "-f", "/tmp/installed"],
        memory_mib=64,
    )
    wait_until(made, in_state(new, "COMPLETED"), new)
    assert Task.objects.get(attempt__job=new).node == task.node
    presence = dict(ImagePresence.objects.filter(environment=row.environment).values_list("node", "state"))
    assert presence[task.node_id] == "present" and "present" not in [
        state for pk, state in presence.items() if pk != task.node_id
    ]
