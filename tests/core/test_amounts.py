"""Durations, sizes and thousandths with a unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.jobs.job_spec import JobRole, job_fields
from portal.services.jobs.amounts import amount_unit, read_amount


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("45 s", "s", 45), ("90 min", "s", 5400), ("500m", "s", 30_000), ("2h", "s", 7200), ("1.5h", "s", 5400),
        ("1h 30m", "s", 5400), ("1 d 2 h", "s", 93_600), ("2:30:00", "s", 9000), ("1-12:00:00", "s", 129_600),
        ("4Gi", "mib", 4096), ("512MiB", "mib", 512), ("1.5 Ti", "mib", 1_572_864), ("2048Ki", "mib", 2),
        ("500m", "milli", 500),
    ],
)  # fmt: skip
def test_what_is_read(text: str, unit: str, amount: int) -> None:
    assert read_amount(text, unit) == amount


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("2:30", "s", "may be minutes or hours"), ("soon", "s", "is not a duration"),
        ("1.5 s", "s", "not a whole number"),
        ("4G", "mib", "Write it with Gi"), ("4gb", "mib", "Write it with Gi"), ("4", "mib", "is not a size"),
        ("1Ki", "mib", "not a whole number"), ("0.5", "milli", "is not an amount"),
        ("4Gi", "milli", "is not an amount"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, unit: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_amount(text, unit)


@given(st.text("0123456789.:-dhmsinKMGTBc ", max_size=30), st.sampled_from(["s", "mib", "milli"]))
def test_every_text_is_an_amount_or_refused_in_a_sentence(text: str, unit: str) -> None:
    try:
        assert read_amount(text, unit) >= 0
    except ValueError as error:
        assert str(error).endswith(".")


def test_fields_with_a_unit() -> None:
    units = {name: amount_unit(rule) for name, rule in (job_fields() | job_fields(JobRole)).items()}
    assert units["time_limit_s"] == units["termination_grace_s"] == "s"
    assert units["memory_mib"] == units["shm_mib"] == "mib"
    assert units["cpu_milli"] == units["milli_per_gpu"] == "milli"
    assert units["tasks"] is units["seed"] is units["min_compute_capability"] is None
    for name, rule in (job_fields() | job_fields(JobRole)).items():
        if rule.value_type is int and name.endswith(("_s", "_mib", "_milli")):
            assert units[name], name
