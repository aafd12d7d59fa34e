"""What the benchmark of memory-bound kernels tries and reports, without a GPU."""

from layerplan.integration.engines.arch import ARCHS
from layerplan.integration.engines.manifest import BY_ID
from tests.bench import memory_bound, memory_rows


def row(family: str, name: str) -> memory_rows.Row:
    return next(r for r in memory_rows.FAMILIES[family]() if r.name == name)


def test_a_toggle_is_the_default_with_that_knob_switched_and_a_knob_that_is_no_switch_is_left():
    made, arch = row("quantize", "quantize 16384x4096 1x128 both ways"), ARCHS["sm_90"]
    default = BY_ID[made.own].load().match(made.region, arch)
    tried = memory_bound.Tried(toggles=("apart", "threads", "absent"))
    (switched,) = tried.knobs(made, default)
    assert dict(switched) == dict(default.knobs) | {"apart": False}
    names = [name for name, _, _ in memory_bound.offers(made, arch, tried)]
    assert names[0] == "quantize/cute" and len(names) == 2 and '"apart": false' in names[1]


def test_a_row_reports_its_share_of_the_faster_copy_and_what_its_writes_alone_take():
    made = row("norm", "rms_norm 16384x4096")
    times = {"copy": 66e-6, "copy by a kernel": 65e-6, memory_bound.FILL: 41e-6, "norm/cute": 68e-6, "norm/cute {}": 67e-6, "norm/quack": 69e-6}
    got = memory_bound.result(made, times, {})
    assert (got["of_copy"], got["best_knobs_of_copy"], got["over_best_peer"]) == (0.956, 0.97, 1.015)
    assert got["fill_us"] == 41.0 and memory_bound.FILL not in [c["name"] for c in got["contenders"]] and got["met"]
