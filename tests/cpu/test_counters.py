"""What is read from the tables of Nsight Compute."""

import sys

import pytest

from tests.bench import counters

LAUNCH = '"1","7","(256, 1, 1)","(4096, 1, 1)","0","9.0","Command line profiler metrics"'
TABLE = f'''==PROF== Connected to process 12
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","12","python","here","kernel_a",{LAUNCH},"gpu__time_duration.sum","us","79.50"
"0","12","python","here","kernel_a",{LAUNCH},"dram__bytes_read.sum","Mbyte","134.25"
"0","12","python","here","kernel_a",{LAUNCH},"smsp__inst_executed.sum","inst","1,234,567"
"1","12","python","here","kernel_b",{LAUNCH},"gpu__time_duration.sum","ns","2,500"
'''


def test_each_kernel_has_its_numbers_in_one_unit():
    a, b = counters.kernels(TABLE)
    assert a == {"kernel": "kernel_a", "us": 79.5, "bytes_read": 134250000.0, "instructions": 1234567.0}
    assert b == {"kernel": "kernel_b", "us": 2.5}


def test_a_run_without_a_table_says_what_came_instead():
    with pytest.raises(RuntimeError, match=r"no table: .*ERR_NVGPUCTRPERM"):
        counters.kernels("==ERROR== ERR_NVGPUCTRPERM - no permission")


def test_rows_are_found_by_family_and_name():
    names = [name for name, _ in counters.chosen(["quantize/quantize 16384x4096 1x128"])]
    assert names == ["quantize/quantize 16384x4096 1x128", "quantize/quantize 16384x4096 1x128 both ways"]


@pytest.mark.parametrize("texts", [[], ["no such row"]])
def test_texts_that_no_row_holds_are_an_error(texts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["counters", *texts])
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    with pytest.raises(SystemExit):
        counters.main()
    assert f"texts = {texts}: no row" in capsys.readouterr().err
