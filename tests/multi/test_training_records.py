"""Training with measured times: all ranks rank by what rank 0 reads, whatever lies beside the others."""

from __future__ import annotations

import pytest
from harness import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("megatron.core")
    folder = str(tmp_path_factory.mktemp("records"))
    (prefix,) = run_ranks("training_records:prepare", 1, 60, folder=folder)
    return run_ranks("training_records:two_ranks", 2, 120, folder=folder, prefix=prefix)


def test_every_rank_plans_with_the_records_of_rank_0(ranks):
    for found in ranks:
        assert found["plain"]["engines"] == ["linear/torch"] and not found["plain"]["measured"]
        assert found["measured"]["engines"] == ["reference/eager"] and found["measured"]["measured"]


def test_records_of_another_board_are_said_once(ranks):
    (line,) = [line for line in ranks[0]["measured"]["said"] if "measured on" in line]
    assert (
        line.startswith("plan.records = ")
        and "measured on another CPU, this run is on " in line
        and "'layerplan tune' measures it" in line
    )
    assert not any("measured on" in line for found in ranks for line in found["plain"]["said"])


def test_rank_0s_broken_records_stop_every_rank(ranks):
    for found in ranks:
        assert (
            found["broken"].startswith("RecipeError")
            and "records-0.json" in found["broken"]
            and "layerplan tune RECIPE --out FILE" in found["broken"]
        )
