"""Which engines ranking may choose in a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from layerplan.integration.engines.manifest import MANIFEST
from layerplan.integration.planner import cover, runner


def off_trial(monkeypatch: pytest.MonkeyPatch, engines: Iterable[str], without: Iterable[str] = ()) -> None:
    """Until the test ends ranking may choose ``engines`` where they are on trial, and none of ``without``."""
    chosen, gone = set(engines), set(without)
    kept = (e for e in MANIFEST if e.id not in gone)
    entries = tuple(dataclasses.replace(e, trial=e.trial and e.id not in chosen) for e in kept)
    monkeypatch.setattr(cover, "MANIFEST", entries)
    monkeypatch.setattr(runner, "_plans", {})
