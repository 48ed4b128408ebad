"""YAML of jobs: what the review shows fills the form again, and errors are named with their lines."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.domain.jobs.job_spec import JobField, job_fields
from portal.models import Job
from portal.services.jobs.job_document import request_body, to_yaml
from portal.web.jobs.launch.form import LaunchForm
from portal.web.jobs.launch.import_yaml import initial_from_yaml

WORDS = st.text("abcXYZ019 -_.:=#'\"{}ü😀\\$&", min_size=1, max_size=12).map(str.strip).filter(bool)
SAMPLES: dict[str, Any] = {
    "gpu_model": ["", "NVIDIA H100 80GB HBM3"],
    "milli_per_gpu": [1000],
    "code_repository": ["", "https://git.example.org/lab/vit.git"],
    "code_ref": ["", "main", "v1.0", "1e3"],
    "code_host_key": [""],
    "code_archive": ["", "a" * 64],
    "code_path": ["", "vit/src", "/volumes/runs/code"],
    "preferred_nodes": ["", "ada-1, ada-2"],
    "mig_profile": [""],
    "checkpoint_dir": ["", "checkpoints", "null"],
    "resume_from": ["", "c0ffee0123"],
    "completion_role": [""],
    "start_after": ["", "2027-03-01T08:00", "2027-07-01T23:59:58"],
    "time_limit_s": ["", "90 min", "2 d", "45 s"],
    "launcher": ["none", "torchrun"],
    "topology_constraint": [""],
}
"""Typed values of fields with a pattern, or with a notation of their own on the form."""


def typed_value(rule: JobField) -> st.SearchStrategy[Any]:
    if rule.name in SAMPLES:
        return st.sampled_from(SAMPLES[rule.name])
    if rule.value_type is bool:
        return st.sampled_from(["on", ""])
    if rule.is_list and rule.choices:
        return st.lists(st.sampled_from(rule.choices), unique=True)
    if rule.is_list:
        return st.lists(st.integers(int(rule.minimum or 0), int(rule.maximum or 0)), max_size=3).map(
            lambda numbers: " ".join(map(str, numbers))
        )
    if rule.choices:
        return st.sampled_from(rule.choices)
    if rule.is_number:
        low, high = rule.minimum or 0, rule.maximum or 0
        whole = st.integers(-(-int(low) // rule.form_factor), min(int(high) // rule.form_factor, 10_000))
        blank = st.just("") if rule.nullable else whole
        return st.one_of(whole.filter(lambda n: n * rule.form_factor >= low), blank).map(str)
    return WORDS


def typed_forms() -> st.SearchStrategy[dict[str, Any]]:
    """Every field of the form that a job has, typed as a user types it."""
    rules = [rule for rule in job_fields().values() if rule.form_name in LaunchForm.base_fields or rule.label]
    names = {"kind", "name", "command", "env", "rank_overrides", "program", "volumes", "roles"}
    fields = {rule.form_name: typed_value(rule) for rule in rules if rule.name not in names}
    fields["name"] = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,20}[A-Za-z0-9]", fullmatch=True)
    fields["command"] = st.lists(WORDS, min_size=1, max_size=4).map(
        lambda words: "run " + " ".join(map(quoted, words))
    )
    fields["env"] = st.dictionaries(st.from_regex(r"[A-Z_]{1,6}", fullmatch=True), WORDS, max_size=3).map(
        lambda found: "\n".join(f"{name}={value}" for name, value in found.items())
    )
    fields["program"] = st.sampled_from(["", "print(1)\n", "  indented: yes\n\n# tab\there"])
    fields["rank_overrides"] = st.sampled_from(["", "0 LR=0.1\n0 NAME=on"])
    fields["secret_variables"] = st.sampled_from(["", "HUB_TOKEN=hub\nB=project/shared"])
    fields["volumes"] = st.sampled_from(["", "imagenet\nruns /out ro"])
    return st.fixed_dictionaries(fields)


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(fields=typed_forms())
def test_a_form_as_yaml_fills_an_equal_form(
    dataset: Any, typed: dict[str, str], fields: dict[str, Any]
) -> None:
    user = dataset.people["m-okafor"]
    user.timezone = "Europe/Berlin"
    form = LaunchForm(
        user, {"kind": "training"} | {name: typed[name] for name in ("project", "environment")} | fields
    )
    if not form.is_valid():
        assert set(form.errors) <= {"preferred_nodes", "min_tasks", "command"}, form.errors
        return
    request = form.to_job_request()
    text = to_yaml(request_body(request))
    initial, wrong = initial_from_yaml(user, text)
    assert not wrong, (wrong, text)
    again = LaunchForm(user, initial=initial).as_posted()
    assert again.is_valid(), again.errors
    assert again.to_job_request() == request, text


def pasted(client: Any, text: str, **more: Any) -> Any:
    return client.post(reverse("import-job"), {"yaml": text} | more)


def test_an_imported_job_fills_the_form_and_launches(
    dataset: Any, client_of: Any, typed: dict[str, str]
) -> None:
    client = client_of("member")
    shown = html.unescape(client.post(reverse("launch-check"), typed).content.decode())
    text = re.search(r'<pre id="p-yaml"[^>]*>(.*?)</pre>', shown, re.DOTALL)[1]
    answer = client.post(reverse("import-job"), {"file": SimpleUploadedFile("job.yaml", text.encode())})
    page = answer.content.decode()
    assert answer.status_code == 200
    assert "The form has the values of the YAML." in page
    assert 'name="name" value="my run"' in page
    assert "python train.py --name &#x27;two words&#x27;</textarea>" in page
    assert not Job.objects.filter(name="my run").exists()


WRONG = """\
name: my run
project: vision
environment: nowhere
tsks: 4
gpus_per_task: many
env:
  SEED: 1
volumes:
  - volume: imagenet
    readonly: true
start_after: 2027-03-01T08:00:00
held: maybe
"""


def test_every_unknown_key_and_bad_value_is_named_with_its_line(client_of: Any) -> None:
    answer = pasted(client_of("member"), WRONG)
    page = html.unescape(answer.content.decode())
    assert answer.status_code == 400
    for line in (
        "Line 3, environment: There is no such environment, or you may not use it.",
        "Line 4, tsks: Unknown field. Did you mean tasks?",
        "Line 5, gpus_per_task: Must be a whole number.",
        "Line 7, env.SEED: Must be text; put it into quotes.",
        "Line 10, volumes.0.readonly: Unknown field. Did you mean read_only?",
        "Line 11, start_after: Must be a time with its offset",
        "Line 12, held: Must be true or false.",
    ):
        assert line in page, line
    assert "tsks: 4" in page  # what was pasted is still there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "It is a list, from line 1 on."),
        ("a: [", "It is not valid YAML"),
        ("name: a\nname: b", "name occurs twice, again in line 2."),
        ("a: &x 1\nb: *x", "Aliases"),
        ("a: !!python/object/apply:os.system [id]", "is neither text, number"),
        ("a: .nan", ".nan in line 1 is too large, or not a number"),
        ("a: !!binary aGk=", "is neither text, number, list nor mapping"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("on: 1", "Line 1, on: Unknown field."),
        ("job: {}\ncron: x", "It is a sweep, schedule or service, in line 1"),
        (
            "name: a\nproject: vision\nenvironment: pytorch-2-9\ncommand: [x]\ntasks: 0",
            "Line 5, tasks: Must be",
        ),
        (
            "name: a\nproject: vision\nenvironment: pytorch-2-9\ncommand: [x]\nheld: true",
            "Line 5, held: The form cannot",
        ),
        (
            'name: a\nproject: vision\nenvironment: pytorch-2-9\ncommand: [x]\nenv: {A: "x\\ny"}',
            "Line 5, env: ",
        ),
        ("name: a\ncommand: [x]", "project: This field is required."),
        ("", "It must be a mapping"),
        ("a" * 300_000, "larger than 256 KiB"),
    ],
)
def test_yaml_that_cannot_be_imported(client_of: Any, text: str, message: str) -> None:
    answer = pasted(client_of("member"), text)
    assert answer.status_code == 400
    assert message in html.unescape(answer.content.decode())
