"""A job request as a document: the body of REST, YAML, and commands for a shell that submit it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.jobs.job_spec import JobField, JobRole, job_fields, json_value, roles_as_json
from portal.domain.jobs.kubernetes import DEFAULT, kubernetes_resources
from portal.domain.jobs.template_parameters import field_error
from portal.domain.states import RuntimeKind
from portal.errors import InvalidRequest
from portal.services.jobs.amounts import amount_unit, read_amount
from portal.services.jobs.submission import JobRequest
from portal.services.unknown_names import unknown_field_message
from portal.services.yaml_input import dump_yaml, line_of, load_yaml_document

REFERENCES = ("project", "environment", "pool")
_ITEM_KEYS = {
    "volumes": {"volume", "target", "read_only"},
    "secrets": {"secret", "owner_type", "variable", "file"},
    "roles": set(job_fields(JobRole)),
}
_FOREIGN = (
    (
        ("apiVersion", "kind"),
        gettext_noop(
            "It is a manifest of Kubernetes, in line {line}. Fairway has fields of its own: environment for image, "
            "command for command and args, gpus_per_task for nvidia.com/gpu (docs/coming-from.md)."
        ),
    ),
    (
        ("job",),
        gettext_noop(
            "It is a sweep, schedule or service, in line {line}; only jobs are read from YAML. Submit it with REST."
        ),
    ),
    (
        ("entrypoint", "searcher"),
        gettext_noop("It is an experiment of Determined AI, in line {line}. Import it on the page Sweeps."),
    ),
    (
        ("services",),
        gettext_noop(
            "It is a file of Docker Compose, in line {line}. Write each service as a job of its own."
        ),
    ),
)
"""Keys by which a document of another kind is recognized, and what to do with it."""
_SWITCH_WORDS = ("yes", "no", "on", "off", "y", "n")
_NOT_IN_DOCUMENTS = {"parameters", "template_version"}
"""They are filled in already, or belong to the template."""
JOBS_PATH = "/api/v1/jobs/"


def request_body(request: JobRequest) -> dict[str, Any]:
    """Return the request as the body of ``POST /api/v1/jobs/``, without defaults."""
    body: dict[str, Any] = {
        "name": request.name,
        "project": request.project.name,
        "environment": request.environment.name,
        "kind": request.kind,
    }
    if request.pool is not None:
        body["pool"] = request.pool.name
    for name, rule in job_fields(type(request)).items():
        value = _plain(json_value(getattr(request, name)))
        shown = value != _plain(rule.default) or name in ("gpus_per_task", "tasks")
        if shown and name not in {*body, *_NOT_IN_DOCUMENTS}:
            body[name] = value
    if request.roles:
        body["roles"] = [_role_body(request, role) for role in request.roles]
        for name in ("tasks", "command"):
            body.pop(name, None)
    if request.dependencies:
        body["dependencies"] = [job.public_id for job in request.dependencies]
    return body


def _plain(value: Any) -> Any:
    """Return lists and dictionaries for sequences and mappings, which YAML writes."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _role_body(request: JobRequest, role: JobRole) -> dict[str, Any]:
    """Return a role without defaults and without amounts that are those of the job."""
    (given,) = roles_as_json([role])
    return {
        name: value
        for name, value in given.items()
        if name == "command"
        or value not in (job_fields(JobRole)[name].default, [], getattr(request, name, None))
    }


def to_yaml(body: Mapping[str, Any]) -> str:
    return dump_yaml(dict(body))


def kubernetes_yaml(request: JobRequest, kind: str = DEFAULT) -> str:
    """Return a job as YAML for kubectl, with a comment on what is left out. Raise NotExportable.

    ``kind`` is one of EXPORT_KINDS.
    """
    environment = request.environment
    image = environment.image if environment.runtime != RuntimeKind.PROCESS.value else ""
    resources, missing = kubernetes_resources(request, image or None, kind)
    remark = f"# Without counterpart, not exported: {', '.join(missing)}.\n" if missing else ""
    return remark + "---\n".join(map(to_yaml, resources))


def command_line(path: str, body: Mapping[str, Any]) -> str:
    """Return a command of the client ``fairway`` that submits the body."""
    if path != JOBS_PATH:
        return f"fairway api POST {path} --data {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    words = ["fairway run"]
    for name, value in body.items():
        rule, flag = job_fields().get(name), name.replace("_", "-")
        if name == "env":
            words += [f"--env={key}={each}" for key, each in value.items()]
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif name in REFERENCES or (rule is not None and rule.is_scalar):
            words.append(f"--{flag}={value}")
        elif name != "command":
            words.append(f"--set={name}={json.dumps(value, ensure_ascii=False)}")
    lines = [words[0], *map(shlex.quote, words[1:])]
    if command := body.get("command"):
        lines.append(f"-- {shlex.join(command)}")
    return " \\\n  ".join(lines)


def curl_command(path: str, body: Mapping[str, Any]) -> str:
    """Return a command that posts the body with curl."""
    text = shlex.quote(json.dumps(body, indent=1, ensure_ascii=False))
    return (
        f'curl --fail-with-body -sS "$FAIRWAY_URL{path}" \\\n  -H "Authorization: Bearer $FAIRWAY_TOKEN" \\\n'
        f'  -H "Content-Type: application/json" \\\n  --data-binary {text}'
    )


@dataclass(frozen=True)
class JobDocument:
    """A job request as read from YAML; ``lines`` are the lines of its keys."""

    fields: dict[str, Any]
    lines: Mapping[str, int]

    def locate(self, wrong: Mapping[str, str]) -> list[str]:
        """Return the errors of fields, each with its line, in the order of the document."""
        found = sorted((line_of(name, self.lines), f"{name}: {message}") for name, message in wrong.items())
        return [
            _("Line {line}, {text}").format(line=line, text=text) if line else text for line, text in found
        ]


def read_job_yaml(text: str, *, filled: bool = True) -> tuple[JobDocument, dict[str, str]]:
    """Return the request and what is wrong with its keys and the types of its values, by field.

    Durations, sizes and thousandths with a unit become numbers (``portal.services.jobs.amounts``). ``filled``: the
    fields of a template are filled in already. Raise InvalidRequest for ``yaml`` if the text is not a YAML
    mapping, or not a job.
    """
    loaded, lines = load_yaml_document(text, "yaml")
    if problem := _foreign_document(loaded, lines, text):
        raise InvalidRequest(fields={"yaml": problem})
    wrong = dict(_convert_amounts(loaded, job_fields(), ""))
    for number, role in enumerate(loaded["roles"] if isinstance(loaded.get("roles"), list) else ()):
        if isinstance(role, dict):
            wrong |= dict(_convert_amounts(role, job_fields(JobRole), f"roles.{number}."))
    return JobDocument(loaded, lines), dict(_document_errors(loaded, filled=filled)) | wrong


def _foreign_document(loaded: Any, lines: Mapping[str, int], text: str) -> str | None:
    """Return what a document is instead of a job, and what to do with it; None for a mapping that may be a job."""
    if isinstance(loaded, dict):
        for keys, message in _FOREIGN:
            if all(key in loaded for key in keys):
                return _(message).format(line=lines.get(keys[0], 1))
        return None
    if isinstance(loaded, list):
        message = _(
            "It is a list, from line {line} on. A job is a mapping, such as name: my-job; submit each on its own."
        )
        return message.format(line=lines.get("0", 1))
    if text.startswith("#!"):
        return _("It is a script, as line 1 says. Write a job in YAML that has it as program, or runs it.")
    return _("It must be a mapping from line 1 on, such as name: my-job.")


def _convert_amounts(
    fields: dict[str, Any], rules: Mapping[str, JobField], prefix: str
) -> Iterator[tuple[str, str]]:
    """Replace amounts with a unit by numbers; yield what is wrong with others."""
    for name, value in fields.items():
        if isinstance(value, str) and name in rules and (unit := amount_unit(rules[name])) is not None:
            try:
                fields[name] = read_amount(value, unit)
            except ValueError as error:
                yield prefix + name, str(error)


def _document_errors(fields: Mapping[str, Any], *, filled: bool) -> Iterator[tuple[str, str]]:
    hidden = _NOT_IN_DOCUMENTS if filled else frozenset[str]()
    rules = {name: rule for name, rule in job_fields().items() if name not in hidden}
    for name, value in fields.items():
        if name in (*REFERENCES, "template"):
            if not isinstance(value, str) and (value is not None or name == "project"):
                yield name, _("Must be text.")
        elif name == "dependencies":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                yield name, _("Must be a list of ids of jobs.")
        elif name not in rules:
            yield name, unknown_field_message(name, [*rules, *REFERENCES, "dependencies"])
        elif error := field_error(rules[name], json_value(value)):
            yield from _with_hint(name, value, rules[name], error)
        else:
            yield from _nested_errors(name, value)


def _with_hint(name: str, value: Any, rule: JobField, error: str) -> Iterator[tuple[str, str]]:
    """Yield the error with what to write instead, where YAML made another type of what was probably meant."""
    is_plain = isinstance(value, bool | int | float)
    if rule.value_type is str and is_plain:
        yield name, _("Must be text; put it into quotes.")
    elif rule.value_type is bool and str(value).lower() in _SWITCH_WORDS:
        yield name, _("Must be true or false; {value} is text in YAML 1.2.").format(value=value)
    elif name == "command" and isinstance(value, str):
        with contextlib.suppress(ValueError):  # such as an open quote
            example = json.dumps(shlex.split(value), ensure_ascii=False)
            error = _("Must be a list of words: {example}").format(example=example[:200])
        yield name, error
    elif name == "command" and isinstance(value, list):
        wrong = [number for number, word in enumerate(value) if not isinstance(word, str)]
        yield from ((f"{name}.{number}", _("Must be text; put it into quotes.")) for number in wrong)
    else:
        yield name, error


def _nested_errors(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if name == "env":
        yield from ((f"env.{key}", _("Must be text; put it into quotes.")) for key, each in value.items()
                    if not isinstance(each, str))  # fmt: skip
    for number, item in enumerate(value if name in _ITEM_KEYS else ()):
        if not isinstance(item, dict):
            yield f"{name}.{number}", _("Must be a mapping.")
            continue
        keys = _ITEM_KEYS[name]
        yield from (
            (f"{name}.{number}.{key}", unknown_field_message(key, keys)) for key in item.keys() - keys
        )
