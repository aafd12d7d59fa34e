"""experts/quack beyond the shared cases: groups of any size, every tile, what is written, rows past 2^31 elements, NaN,
capture, and a layer of experts on it, training and inference."""

import dataclasses

import pytest
import torch

from layerplan.integration.engines.arch import Arch
from layerplan.integration.engines.contract import Offer
from layerplan.integration.engines.packages import locate
from layerplan.kernels.linear import quack_experts
from tests import oracle
from tests.cases import quack_experts as cases
from tests.cases.quack_experts import Case, as_tuple
from tests.cases.trial import off_trial
from tests.gpu.capture import replays_and_waits_for_no_host
from tests.gpu.memory import need

pytestmark = pytest.mark.skipif(not locate("quack").here, reason="needs quack-kernels")
BF16 = torch.bfloat16


def built(case: Case, *knobs):
    return cases.built(case, Arch.of_device(0), *knobs)


@pytest.mark.parametrize("case", [*cases.SMALL, *cases.LARGE], ids=str)
def test_results_are_as_exact_as_pytorchs_and_reruns_bitwise_equal(case):
    cases.run(case, built(case), "cuda")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("tile_n", [128, 160, 192])
def test_gradients_of_every_width_of_tile_are_right(tile_n, weighted):
    if Arch.of_device(0).name != "sm_90":
        pytest.skip("one width of tile on this arch")
    case = Case("gradient", tokens=517, slots=4, experts=16, width=256, half=776, skew=0.1, dropped=0.1)
    case = case if weighted else dataclasses.replace(case, probs=None, want=("dx",))
    cases.run(case, built(case, ("tile_n", tile_n)), "cuda")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", cases.KINDS)
def test_groups_of_random_sizes_around_those_of_a_tile_are_right(kind, seed):
    gen = torch.Generator().manual_seed(seed)
    tokens, slots, experts = (int(torch.randint(a, b, (), generator=gen)) for a, b in ((1, 700), (1, 5), (5, 40)))
    case = Case(kind, tokens, slots, experts, 136, 200, skew=0.2 * (seed % 3), dropped=0.25 * (seed % 2))
    cases.run(case, built(case), "cuda", seed=seed)


def test_nothing_is_written_around_a_gradient_nor_behind_the_last_group(monkeypatch):
    case = Case("gradient", tokens=200, experts=7, width=128, half=168, dropped=0.3)
    launch, (given, used), held = built(case), cases.inputs(case), []

    def sentinel(gate_up):
        held.append(oracle.guarded(torch.full_like(gate_up, oracle.SENTINEL), offset=64, rows=16))
        return held[-1][0]

    here = [t.cuda() for t in given.values()]
    expected = launch(*here)[0]
    monkeypatch.setattr(quack_experts, "fresh", sentinel)
    got = launch(*here)[0]
    ((inner, buffer),) = held
    oracle.check_guards(inner, buffer, "dx")
    oracle.same_bits(got[:used], expected[:used], "dx")
    assert bool((got[used:] == torch.tensor(oracle.SENTINEL).to(BF16).item()).all()), "rows behind the last group"


@pytest.mark.parametrize("kind", cases.KINDS)
def test_nan_stays_in_its_row(kind):
    case = Case(kind, tokens=300, experts=3, width=128, half=128)
    launch, (given, used) = built(case), cases.inputs(case)
    here = {n: t.cuda() for n, t in given.items()}
    clean = [t.clone() for t in as_tuple(launch(*here.values()))]
    matrix, row = ("x", 7) if kind.startswith("gathered") else ("rows", 151)
    here[matrix][row, 5] = float("nan")
    reached = here["row_map"][row].long().tolist() if kind.startswith("gathered") else [row]
    for before, after in zip(clean, as_tuple(launch(*here.values())), strict=True):
        if after.dim() == 2 or kind == "gradient":
            assert bool(after[reached].isnan().all())
        kept = torch.ones(used, dtype=torch.bool, device="cuda")
        kept[reached] = False
        oracle.equal(after[:used][kept], before[:used][kept], "the other rows")


@pytest.mark.parametrize("kind", cases.KINDS)
def test_rows_past_2_31_elements_are_right_at_both_ends(kind):
    """One group: rows of a small launch are those of the large one, whose result is 2^31 + 5 million elements."""
    need(32)
    tokens, width, half = 131136, 64, 16416 if kind.endswith("gated") else 8208
    case = Case(kind, tokens, 1, 1, width, half)
    gen = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=BF16, device="cuda").normal_(generator=gen)

    weight = normal(*((1, width, half) if kind == "gradient" else (1, 2 * half, width))) * width**-0.5
    x, p = normal(tokens, width), torch.rand(tokens, 1, generator=gen, device="cuda")
    gate_up = normal(tokens, 2 * half) if kind == "gradient" else None

    def given(part: slice) -> tuple[torch.Tensor, ...]:
        rows = x[part]
        ends = torch.tensor([len(rows)], dtype=torch.int32, device="cuda")
        row_map = torch.arange(len(rows), dtype=torch.int32, device="cuda").unsqueeze(1)
        named = {"x": rows, "rows": rows, "offsets": ends, "counts": ends, "row_map": row_map, "w": weight,
                 "probs": p[part], "p": p[part].view(-1)}  # fmt: skip
        named |= {} if gate_up is None else {"gate_up": gate_up[part]}
        return tuple(named[n] for n in cases.region(case).graph.inputs)

    launch = built(case)
    whole = as_tuple(launch(*given(slice(0, tokens))))
    assert max(t.numel() for t in whole) > 2**31
    for part in (slice(0, 256), slice(tokens - 256, tokens)):
        for a, b in zip(whole, as_tuple(launch(*given(part))), strict=True):
            oracle.equal(a[part], b, f"{kind}: rows {part}")


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_captured_launch_replays_on_new_data_and_waits_for_no_host(kind):
    case = Case(kind, tokens=300, experts=9, width=128, half=136)
    launch, (given, _) = built(case), cases.inputs(case)
    here = [t.cuda() for t in given.values()]
    replays_and_waits_for_no_host(lambda: as_tuple(launch(*here)), here, kind)


# ---- a layer ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch):
    """The engine may be chosen, by the time of the device alone: launches of this size cost their host more."""
    off_trial(monkeypatch, [cases.ENGINE])
    monkeypatch.setattr(Offer, "seconds", lambda offer, roofline: roofline / offer.efficiency)


@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("probs_dtype", [torch.float32, BF16])
def test_a_layer_of_experts_trains_and_infers_on_it_as_exactly_as_pytorch(probs_dtype, dropped, chosen):
    layer = cases.Layer(1031, 4, 8, 512, 256, probs_dtype, dropped)
    layer.chooses(Arch.of_device(0))
    layer.hold("cuda")
