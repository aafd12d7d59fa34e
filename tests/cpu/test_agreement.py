"""What ranks compare before the first step: nothing that planning reads is left out, and what differs is named."""

from __future__ import annotations

import dataclasses

import pytest

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.engines.packages import distribution
from layerplan.integration.planner import agreement
from layerplan.integration.planner.agreement import OF_A_RANK, digest, planning_facts
from layerplan.integration.planner.plan_file import Pin, Pins
from layerplan.integration.planner.policy import Policy
from layerplan.integration.planner.records import Record, Records
from layerplan.integration.settings import Settings

CPU = ARCHS["cpu"]
PINS = Pins((("cpu", "abc@", Pin("norm/torch", ("rms_norm",))),))
RECORDS = Records((Record("cpu", "a board", "abc@", ("rms_norm",), "norm/torch", microseconds=2.0, quartiles=(1.0, 3.0)),))
OTHERS = {"check": True, "policy": "strict", "deterministic": True, "log": "debug", "records": "r.json", "nvtx": True,
          "cache": "/c"}  # fmt: skip
FIELDS = [f.name for f in dataclasses.fields(Settings)]


def test_every_setting_has_another_value_here():
    assert set(OTHERS) == set(FIELDS) and set(OF_A_RANK) <= set(FIELDS)
    assert all(getattr(Settings(), name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_that_can_change_a_plan_is_compared_and_no_other(monkeypatch, name):
    before = planning_facts(CPU)
    changed = dataclasses.replace(Settings(), **{name: OTHERS[name]})
    monkeypatch.setattr(agreement, "settings", lambda: changed)
    after = planning_facts(CPU)
    assert {field for field in before if before[field] != after[field]} == (set() if name in OF_A_RANK else {f"environment: {name}"})


def test_the_version_of_every_package_that_an_engine_needs_is_compared():
    facts = planning_facts(CPU)
    for name in {distribution(n) for e in MANIFEST for n in e.needs} | {"nvidia-cutlass-dsl", "apache-tvm-ffi", "cuDNN", "layerplan"}:
        assert f"version of {name}" in facts, name
    for arch in ARCHS.values():
        engines = {field.partition(" ")[2] for field in planning_facts(arch) if field.startswith("engine ")}
        assert engines == {e.id for e in MANIFEST if arch.name in e.archs}


@pytest.mark.parametrize(("given", "field"), [
    ({"policy": Policy("strict")}, "policy"), ({"pins": PINS}, "plan file: SHA-256"), ({"records": RECORDS}, "records: SHA-256"),
])  # fmt: skip
def test_what_a_model_is_planned_with_changes_the_digest(given, field):
    plain, other = planning_facts(CPU, records=Records()), planning_facts(CPU, **{"records": Records(), **given})
    assert {f for f in plain if plain[f] != other[f]} == {field} and digest(plain) != digest(other)
    assert digest(other) == digest(planning_facts(CPU, **{"records": Records(), **given}))
    assert plain["records: SHA-256"] == "no records"  # what a message says of a rank that has none


def test_a_digest_does_not_depend_on_the_order_of_facts_but_on_their_types():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": "1", "b": 2})


def test_many_ranks_are_counted_and_few_are_named():
    everyone = {rank: {"x": int(rank > 0)} for rank in range(10)} | {3: {}}
    (problem,) = agreement._differences({"x": 1}, everyone)
    assert problem.field == "x" and problem.rule == "differs between ranks: 0 on rank 0, 1 on rank 1, 2, 4, 5 and 4 more, None on rank 3"
