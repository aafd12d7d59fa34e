"""Everything here needs one CUDA device; without one the whole folder is skipped, and that is said."""

import contextlib
import signal
from pathlib import Path

import pytest
import torch

from layerplan.integration.engines.packages import locate
from tests.gpu.memory import release

if torch.cuda.is_available() and locate("transformer_engine").here:
    # Megatron imports it, and it cannot be imported once torch has loaded cuDNN; without it their tests fail themselves
    with contextlib.suppress(ImportError, OSError):
        import transformer_engine.pytorch  # noqa: F401

HERE = Path(__file__).parent
LIMIT_S = 120


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _time_limit():
    """A kernel that hangs ends the test with a stack, not the run with silence."""

    def stop(*_):
        raise TimeoutError(f"the test ran longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _leave_no_memory(request):
    yield
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()  # a fault belongs to the test that caused it
        except RuntimeError as error:  # nothing after it can run in this process
            pytest.exit(f"{request.node.nodeid} broke the CUDA context: {str(error).splitlines()[0]}", returncode=1)
        if torch.cuda.memory_allocated() > 1 << 30 or torch.cuda.memory_reserved() > 20 << 30:
            torch.cuda.empty_cache()
    release()
