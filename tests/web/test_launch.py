"""Launch: what is typed becomes the request that is meant; what can never run is refused with what could."""

from __future__ import annotations

import io
import re
import tarfile

import pytest
from django.urls import reverse

from portal.domain.jobs.job_spec import JobSpec
from portal.models import CodeArchive, Job, JobVerdict, Quota, UsageInterval
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.initial_values import initial_from_api_fields, initial_from_job
from portal.web.jobs.launch.spec_fields import form_values
from tests import factories


def test_form_fields_become_the_job(dataset, client_of, typed):
    answer = client_of("member").post(reverse("launch"), typed)
    job = Job.objects.get(name="my run")
    assert answer["Location"] == reverse("job", args=[job.public_id])
    assert job.command == ["python", "train.py", "--name", "two words"]
    assert job.env == {"SEED": "1", "NAME": "two words"}
    assert (job.cpu_milli, job.memory_mib, job.time_limit_s) == (1500, 4096, 5400)
    assert (job.gpus_per_task, job.milli_per_gpu, job.preemptible) == (2, 1000, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py", ["python", "train.py"]),
        ("python train.py | tee log", ["/bin/sh", "-c", "python train.py | tee log"]),
        ("cd code\npython train.py", ["/bin/sh", "-c", "cd code\npython train.py"]),
        ("echo $HOME", ["/bin/sh", "-c", "echo $HOME"]),
    ],
)
def test_a_command_is_split_or_given_to_the_shell(dataset, typed, text, words):
    form = LaunchForm(dataset.people["m-okafor"], typed | {"command": text})
    assert form.is_valid(), form.errors
    assert list(form.to_job_request().command) == words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90 min", 5400),
        ("12 h", 43200),
        ("2 d", 172800),
        ("1.5h", 5400),
        ("45s", 45),
        ("8", 28800),
        ("", None),
        ("none", None),
    ],
)
def test_spans_are_read_with_their_unit(dataset, typed, text, seconds):
    form = LaunchForm(dataset.people["m-okafor"], typed | {"time_limit_s": text})
    assert form.is_valid(), form.errors
    assert form.to_job_request().time_limit_s == seconds


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("time_limit_s", "soon", "Write a time such as"),
        ("env", "NO SIGN", "is not NAME=value"),
        ("command", "echo 'open", "quotation mark"),
        ("command", "", "Enter a command"),
        ("env", "CUDA_VISIBLE_DEVICES=0", "is set by Fairway"),
        ("name", "!", "Use up to 100 letters"),
    ],
)
def test_errors_are_shown_beside_the_field(client_of, typed, field, value, message):
    answer = client_of("member").post(reverse("launch"), typed | {field: value})
    assert answer.status_code == 400
    assert message in answer.content.decode()
    assert not Job.objects.filter(name="my run").exists()


def test_the_impossible_is_refused_with_the_nearest_that_could_run(client_of, typed):
    answer = client_of("member").post(reverse("launch"), typed | {"gpus_per_task": "9"})
    page = answer.content.decode()
    assert answer.status_code == 422
    assert "the largest node has 8" in page
    assert 'data-set="tasks=1;gpus_per_task=8"' in page
    assert not Job.objects.filter(name="my run").exists()


def test_the_summary_works_without_the_engine(client_of, typed):
    client = client_of("member")
    room = client.post(reverse("launch-check"), typed).content.decode()
    assert "Fits on free GPUs" in room
    never = client.post(reverse("launch-check"), typed | {"gpus_per_task": "9"}).content.decode()
    assert "This can never start here" in never
    waits = client.post(reverse("launch-check"), typed | {"gpus_per_task": "8", "gpu_model": "NVIDIA H200"})
    assert "It would wait" in waits.content.decode()
    assert not Job.objects.filter(name="my run").exists()


@pytest.mark.parametrize(
    ("answer", "title"),
    [
        (
            {"starts_now": True, "never": False, "where": ["ada-1"], "verdict": None, "alternatives": []},
            "It starts now",
        ),
        (
            {
                "starts_now": False,
                "never": False,
                "where": [],
                "verdict": {"message": "Two jobs are ahead."},
                "alternatives": [{"message": "4 A100 would start now", "fields": {"gpus_per_task": 4}}],
            },
            "It would wait",
        ),
    ],
)
def test_the_summary_shows_the_answer_of_the_engine(client_of, typed, monkeypatch, answer, title):
    asked = {}

    def engine(body, wait_s):
        asked.update(body)
        return answer

    monkeypatch.setattr("portal.web.jobs.launch.preview.query_would_start", engine)
    page = client_of("member").post(reverse("launch-check"), typed).content.decode()
    assert title in page
    assert asked["gpus_per_task"] == 2
    for way in answer["alternatives"]:
        assert way["message"] in page
        assert 'data-set="gpus_per_task=4"' in page


@pytest.mark.parametrize(
    ("fields", "pools"),
    [
        ({}, {"h200", "a100", "ada"}),
        ({"pool": "a100"}, {"a100"}),
        ({"gpu_model": "NVIDIA RTX 6000 Ada Generation"}, {"ada"}),
        ({"min_gpu_memory_gib": "100"}, {"h200"}),
        ({"min_gpu_memory_gib": "60"}, {"h200", "a100"}),
        ({"tasks": "2", "gpus_per_task": "8"}, {"h200", "a100"}),  # ada has one node
        ({"gpus_per_task": "0", "cores": "120"}, {"a100", "ada"}),
    ],
)
def test_the_quotas_shown_are_those_of_the_pools_that_fit(dataset, client_of, typed, fields, pools):
    dataset.nodes["ada-1"].pool.nodes.update(cpu_milli=124_000)
    dataset.nodes["h200-1"].pool.nodes.update(cpu_milli=96_000)
    if "pool" in fields:
        fields = fields | {"pool": dataset.pools[fields["pool"]].public_id}
    page = client_of("member").post(reverse("launch-check"), typed | fields)
    assert {bar.share.pool.name for bar in page.context["quota_bars"]} == pools


def test_the_quota_of_a_job_that_starts_now_is_that_of_its_pool(dataset, client_of, typed, monkeypatch):
    answer = {"starts_now": True, "where": ["a100-2"], "verdict": None, "alternatives": []}
    monkeypatch.setattr("portal.web.jobs.launch.preview.query_would_start", lambda body, wait_s: answer)
    page = client_of("member").post(reverse("launch-check"), typed)
    assert [bar.share.pool.name for bar in page.context["quota_bars"]] == ["a100"]
    Quota.objects.filter(pool=dataset.pools["a100"]).delete()
    UsageInterval.objects.all().delete()
    page = client_of("member").post(reverse("launch-check"), typed)
    assert [bar.terms.startswith("no quota") for bar in page.context["quota_bars"]] == [True]


def test_the_sizes_are_limited_by_the_quota_of_the_chosen_pool(dataset, client_of, typed):
    Quota.objects.filter(project=dataset.projects["vision"], pool=dataset.pools["ada"]).update(
        limit_milli=2000
    )
    client = client_of("member")

    def texts(**fields):
        page = client.post(reverse("launch-check"), typed | fields)
        return [preset.availability for preset in page.context["size_presets"]]

    assert "limit is 2" in texts(pool=dataset.pools["ada"].public_id)
    assert "limit is 2" in texts(gpu_model="NVIDIA RTX 6000 Ada Generation")
    assert not any("limit" in text for text in texts(pool=dataset.pools["h200"].public_id))


def test_only_projects_where_one_may_launch_are_offered(dataset, client_of, typed):
    answer = client_of("stranger").post(reverse("launch"), typed)
    assert answer.status_code == 400
    assert not Job.objects.filter(name="my run").exists()


def test_a_job_in_the_form_is_submitted_unchanged(dataset):
    for name in ("vit-h-pretrain", "dino-abl-b128"):
        odd = {"min_gpu_memory_mib": 81_559, "shm_mib": 4_097, "termination_grace_s": 95}
        Job.objects.filter(pk=dataset.jobs[name].pk).update(**odd)
        job = Job.objects.select_related("project", "environment", "pool").get(pk=dataset.jobs[name].pk)
        start = {
            key: value
            for key, value in initial_from_job(job.owner, job).items()
            if value not in ("", None, False)
        }
        form = LaunchForm(dataset.people["m-okafor"], start)
        assert form.is_valid(), form.errors
        request = form.to_job_request()
        for field in (
            "tasks",
            "gpus_per_task",
            "cpu_milli",
            "memory_mib",
            "time_limit_s",
            "priority",
            "preemptible",
            *odd,
        ):
            assert getattr(request, field) == getattr(job, field), field
        assert list(request.command) == job.command


def test_an_elastic_job_in_the_form_is_submitted_unchanged(client_of, typed):
    asks = typed | {"tasks": "4", "min_tasks": "2"}
    page = client_of("member").post(reverse("launch-check"), asks).content.decode()
    assert "starts with 2, grows up to 4" in page
    assert client_of("member").post(reverse("launch"), asks).status_code == 302
    job = Job.objects.get(name="my run")
    assert (job.tasks, job.min_tasks) == (4, 2)
    assert initial_from_job(job.owner, job)["min_tasks"] == 2
    wrong = client_of("member").post(reverse("launch"), asks | {"min_tasks": "5"})
    assert wrong.status_code == 400
    assert "Must be between 1 and the number of tasks." in wrong.content.decode()
    note = asks | {"kind": "workspace", "environment": "", "name": "note"}
    assert (
        "min_tasks"
        not in client_of("member").post(reverse("launch-check"), note).context["check"].field_errors
    )


def test_the_cheapest_change_opens_the_form_changed(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    page = client_of("member").get(reverse("job", args=[job.public_id])).content.decode()
    assert "4 × A100 would start now" in page
    change = {"like": job.public_id, "gpus_per_task": "4", "gpu_model": "NVIDIA A100-SXM4-80GB"}
    form = client_of("member").get(reverse("launch"), change)
    assert form.context["form"]["gpus_per_task"].value() == "4"
    assert form.context["model"] == "NVIDIA A100-SXM4-80GB"


def test_a_suggested_pool_or_topology_opens_the_form_changed(dataset, client_of):
    job = dataset.jobs["depth-anything-ft"]
    job.topology_constraint = {"topology": "dc", "required": "rack"}
    job.save()
    JobVerdict.objects.filter(job=job).update(
        suggestion={"kind": "other_pool", "message": "m", "fields": {"pool": dataset.pools["ada"].public_id}}
    )

    def form_of_suggestion():
        page = client_of("m-okafor").get(reverse("job", args=[job.public_id])).content.decode()
        (link,) = re.findall(r'href="([^"]*)">Launch with this change', page)
        return client_of("m-okafor").get(link.replace("&amp;", "&")).context["form"]

    form = form_of_suggestion()
    assert form["pool"].value() == dataset.pools["ada"].public_id
    assert form["topology_required"].value() == "dc:rack"
    JobVerdict.objects.filter(job=job).update(
        suggestion={"kind": "relax_topology", "message": "m", "fields": {"topology_constraint": None}}
    )
    assert form_of_suggestion()["topology_required"].value() == ""


def test_only_kinds_with_a_behaviour_of_their_own_are_offered(client_of, typed):
    form = client_of("member").get(reverse("launch")).context["form"]
    assert [value for value, _ in form.fields["kind"].choices] == ["workspace", "training", "service"]
    refused = client_of("member").post(reverse("launch"), typed | {"kind": "sweep"})
    assert refused.status_code == 400 and "kind" in refused.context["form"].errors


def test_unknown_overrides_are_left_out():
    assert initial_from_api_fields({"nonsense": 1, "gpus_per_task": 2}) == {"gpus_per_task": 2}


def test_the_nearest_request_sets_fields_that_the_form_has(client_of, typed):
    page = client_of("member").post(reverse("launch"), typed | {"cores": "500"}).content.decode()
    assert "Nearest feasible request: " in page
    assert re.search(r'data-set="cores=\d+"', page)


def test_mig_slices_are_offered_where_available_and_requested_as_a_whole(client_of, dataset, typed) -> None:
    member = client_of("member")
    assert "MIG slices" not in member.get("/launch/?kind=training").content.decode()
    dataset.nodes["ada-1"].gpus.filter(index__gte=4).update(mig_profile="1g.12gb", compute_capability=8.9)
    assert '<option value="1g.12gb">1g.12gb</option>' in member.get("/launch/?kind=training").content.decode()
    slices = {"mig_profile": "1g.12gb", "min_compute_capability": "8.6"}
    form = typed | {"gpus_per_task": "1", "milli_per_gpu": "500"} | slices
    assert member.post("/launch/", form).status_code == 302
    job = Job.objects.get(name="my run")
    assert (job.mig_profile, job.min_compute_capability, job.milli_per_gpu) == ("1g.12gb", 8.6, 1000)
    page = member.get(f"/jobs/{job.public_id}/").content.decode()
    assert "1g.12gb" in page and "8.6 or more" in page
    for wrong in ({"mig_profile": "9g.99gb"}, {"min_compute_capability": "nan"}):
        assert member.post("/launch/", form | wrong).status_code == 400


def test_a_gang_on_different_gpus_is_asked_for_and_shown(client_of, typed) -> None:
    member = client_of("member")
    form = typed | {"gpus_per_task": "1", "tasks": "2", "allow_mixed_gpus": "on"}
    assert member.post("/launch/", form).status_code == 302
    job = Job.objects.get(name="my run")
    assert job.allow_mixed_gpus
    assert "Different GPUs" in member.get(f"/jobs/{job.public_id}/").content.decode()
    assert re.search(
        r'name="allow_mixed_gpus"[^>]*checked',
        member.post("/launch/", form | {"cores": "0"}).content.decode(),
    )


def test_dependencies_are_own_jobs_or_others_by_id(dataset, client_of, typed):
    client = client_of("member")
    me = dataset.people["m-okafor"]
    mine = Job.objects.filter(owner=me, kind="training", state__in=["PENDING", "RUNNING"]).first()
    manager = dataset.projects["vision"].memberships.filter(role="manager").first().user
    colleagues = factories.job(manager, dataset.projects["vision"], dataset.environments["batch"])
    page = client.get(reverse("launch")).content.decode()
    assert f'name="dependencies" value="{mine.public_id}"' in page
    wanted = {
        "dependencies": [mine.public_id],
        "dependency_ids": f" {colleagues.public_id}, {mine.public_id}",
        "ignore_dependency_failure": "on",
    }
    client.post(reverse("launch"), typed | wanted)
    job = Job.objects.get(name="my run")
    assert {row.depends_on for row in job.dependencies.all()} == {mine, colleagues}
    assert job.ignore_dependency_failure
    JobVerdict.objects.create(
        job=job, code="dependency", message="It starts after both have ended.", details={"jobs_awaited": 2},
        jobs_ahead=[], decided_at=job.submitted_at, code_since=job.submitted_at,
    )  # fmt: skip
    page = client.get(reverse("job", args=[job.public_id])).content.decode()
    assert "Dependency" in page and "have ended" in page and "No estimate yet" not in page
    assert ">Dependencies</h2>" in page and "even if they fail" in page and mine.name in page
    assert ">Dependents</h2>" in client.get(reverse("job", args=[mine.public_id])).content.decode()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"dependency_ids": "no-such-job"},
        {"dependency_ids": "<b>x</b>"},
        {"dependency_ids": "' OR 1=1"},
        {"dependency_ids": "\u202e😀"},
        {"dependencies": ["nothing"]},
        {"dependencies": ["0" * 500]},
    ],
)
def test_an_unknown_dependency_is_reported_at_its_field(dataset, client_of, typed, nonsense):
    answer = client_of("member").post(reverse("launch"), typed | nonsense)
    page = answer.content.decode()
    assert answer.status_code == 400 and not Job.objects.filter(name="my run").exists()
    (field,) = nonsense
    assert answer.context["form"].errors[field]
    assert "<b>x</b>" not in page
    assert re.search(r'<details class="fw-more" data-not-for="service" open><summary>Dependencies', page)


def test_a_hidden_job_cannot_be_a_dependency(dataset, client_of, typed):
    hidden = Job.objects.filter(project=dataset.projects["nlp"]).first()
    answer = client_of("member").post(reverse("launch"), typed | {"dependency_ids": hidden.public_id})
    assert answer.status_code == 400
    assert hidden.name not in answer.content.decode()


def test_a_chosen_dependency_that_ended_meanwhile_is_checked(dataset, client_of, typed):
    me = dataset.people["m-okafor"]
    ended = Job.objects.filter(owner=me, kind="training", state="FAILED").first()
    answer = client_of("member").post(reverse("launch"), typed | {"dependencies": [ended.public_id]})
    assert answer.status_code == 400
    assert f"{ended.name} failed and can never complete" in answer.content.decode()


def test_only_environments_for_the_project_are_offered(dataset, client_of, typed):
    lab, batch = dataset.environments["lab"], dataset.environments["batch"]
    page = client_of("member").get(reverse("launch")).content.decode()
    assert "on 5 of 6\xa0nodes; pulled where it is missing" in page
    batch.projects.set([dataset.projects["nlp"]])
    page = client_of("member").get(reverse("launch")).content.decode()
    assert lab.title in page and batch.title not in page
    answer = client_of("admin").get(reverse("launch"))
    assert f'data-projects="{dataset.projects["nlp"].public_id}"' in answer.content.decode()
    refused = client_of("admin").post(reverse("launch"), typed)
    assert "is not available to the project vision." in refused.content.decode()


def test_a_copied_request_for_several_models_keeps_them(dataset, client_of):
    job = dataset.jobs["vit-h-pretrain"]
    Job.objects.filter(pk=job.pk).update(gpu_model="NVIDIA H200|NVIDIA A100")
    page = client_of("member").get(reverse("launch"), {"like": job.public_id}).content.decode()
    assert '<input type="radio" name="gpu_model" value="NVIDIA H200|NVIDIA A100" checked>' in page
    assert "H200 or A100" in page
    plain = client_of("member").get(reverse("launch")).content.decode()
    assert "as requested" not in plain


@pytest.mark.parametrize(
    ("zone", "utc"), [("UTC", "08:30"), ("Europe/Berlin", "07:30"), ("Asia/Kolkata", "03:00")]
)
def test_a_start_time_is_typed_in_the_time_zone_of_the_user(dataset, typed, zone, utc):
    user = dataset.people["m-okafor"]
    user.timezone = zone
    form = LaunchForm(user, typed | {"start_after": "2030-01-15T08:30"})
    assert form.is_valid(), form.errors
    assert f"{form.to_job_request().start_after:%Y-%m-%dT%H:%M%z}" == f"2030-01-15T{utc}+0000"
    again = LaunchForm(user, initial={"start_after": "2030-01-15T07:30:00Z"})
    assert f"{again['start_after'].value()}" == {"UTC": "2030-01-15T07:30", "Europe/Berlin": "2030-01-15T08:30",
                                                 "Asia/Kolkata": "2030-01-15T13:00"}[zone]  # fmt: skip
    wrong = LaunchForm(user, typed | {"start_after": "soon"})
    assert "Enter a date and a time" in str(wrong.errors["start_after"])


@pytest.mark.parametrize(
    ("mib", "shown"), [(24_105, "23.54"), (8192, "8"), (1000, "0.977"), (65_537, "64.001")]
)
def test_an_amount_has_as_few_digits_as_the_form_needs_to_read_it_back(mib, shown):
    assert form_values(JobSpec, {"memory_mib": mib})["memory_gib"] == shown
    assert round(float(shown) * 1024) == mib


def archive(name: str, *, link: bool = False) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as made:
        header = tarfile.TarInfo(name)
        if link:
            header.type, header.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(header, io.BytesIO())
    packed.seek(0)
    packed.name = "code.tar"
    return packed


def test_an_archive_is_uploaded_with_the_form_and_kept_when_another_field_is_wrong(dataset, client_of, typed):
    client = client_of("member")
    wrong = client.post(
        reverse("launch"), typed | {"code_upload": archive("train.py"), "time_limit_s": "soon"}
    )
    stored = CodeArchive.objects.defer("content").get()
    assert wrong.status_code == 400 and f'value="{stored.sha256}"' in wrong.content.decode()
    client.post(reverse("launch"), typed | {"code_archive": stored.sha256})
    job = Job.objects.get(name="my run")
    assert job.code_archive == stored.sha256
    assert stored.sha256[:12] in client.get(reverse("job-run", args=[job.public_id])).content.decode()
    again = client.post(reverse("launch"), typed | {"code_upload": archive("train.py"), "name": "second run"})
    assert again.status_code == 302 and CodeArchive.objects.count() == 1

    refused = client.post(
        reverse("launch"), typed | {"code_upload": archive("out", link=True), "name": "third"}
    )
    assert "is a symbolic link; only files and folders may be." in refused.content.decode()
    assert CodeArchive.objects.count() == 1 and not Job.objects.filter(name="third").exists()


def test_the_lists_of_volumes_and_secrets_fill_the_typed_lines(dataset, client_of):
    factories.cluster_settings()
    text = client_of("member").get(reverse("launch")).content.decode()
    assert 'name="volumes"' in text or "No volume is available" in text
    assert 'data-lines="secret_variables"' in text and 'name="secret_variables"' in text
