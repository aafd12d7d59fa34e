"""The progress of a run on stderr: a bar on a terminal, lines in a pipe, nothing where none is asked for."""

import io
import re
import sys

import pytest

from layerplan.integration.training.metrics import Progress

ROW = {"loss": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_s": 12345.6}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def streams(monkeypatch):
    """(stdout, stderr) of a stream's class; the environment says nothing about colours or widths."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")

    def put(kind):
        out, err = io.StringIO(), kind()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return put


def plain(text):
    """Without the sequences that move the cursor or set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_a_bar_with_steps_and_figures_and_is_left_as_it_was(streams):
    out, err = streams(Terminal)
    progress = Progress(40, 10, show=True)
    progress.update(ROW | {"step": 11}, 0.0)
    progress.update(ROW | {"step": 40, "validation_loss": 3.0, "mfu": 0.417}, 0.1)
    progress.close()
    text = err.getvalue()
    assert "\x1b[?25l" in text and "\x1b[?25h" in text, "the cursor is hidden, and shown again"
    last = plain(text).replace("\r", "\n").rstrip().splitlines()[-1]
    assert "training" in last and "40/40" in last and "━" in last
    assert "loss 2.5000  norm 1.250  lr 3.00e-04  12,346 tokens/s  validation 3.0000  MFU 41.7%" in last
    assert out.getvalue() == "", "stdout may be a pipe while stderr is a terminal"


def test_a_bar_of_a_resumed_run_begins_where_that_was(streams):
    _, err = streams(Terminal)
    progress = Progress(40, 10, show=True)
    progress.close()
    assert "10/40" in plain(err.getvalue())


def test_a_pipe_gets_a_line_every_ten_seconds_and_whatever_must_not_be_missed(streams):
    out, err = streams(io.StringIO)
    progress = Progress(6, 0, show=True)
    for step, now in ((1, 100.0), (2, 105.0), (3, 109.9), (4, 110.0), (5, 111.0), (6, 112.0)):
        progress.update(ROW | {"step": step} | ({"validation_loss": 3.0} if step == 3 else {}), now)
    progress.close()
    lines = err.getvalue().splitlines()
    # 1: the first; 3: with a validation loss, from which the ten seconds count anew; 6: the last
    assert [line.split()[1] for line in lines] == ["1/6", "3/6", "6/6"]
    assert lines[0] == "step 1/6  loss 2.5000  norm 1.250  lr 3.00e-04  12,346 tokens/s"
    assert lines[1].endswith("validation 3.0000") and "\x1b" not in err.getvalue() and out.getvalue() == ""


def test_ten_seconds_after_the_last_line_there_is_another(streams):
    _, err = streams(io.StringIO)
    progress = Progress(100, 0, show=True)
    for step in range(1, 26):
        progress.update(ROW | {"step": step}, float(step))
    assert [line.split()[1] for line in err.getvalue().splitlines()] == ["1/100", "11/100", "21/100"]


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_nothing_is_shown_where_none_is_asked_for(streams, kind):
    out, err = streams(kind)
    progress = Progress(2, 0, show=False)
    progress.update(ROW | {"step": 2, "validation_loss": 3.0}, 0.0)
    progress.close()
    assert out.getvalue() == err.getvalue() == ""
