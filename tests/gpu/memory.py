"""What tests that need gigabytes share."""

import pytest
import torch


def need(gib: int) -> None:
    """Skip the test where the GPU has less than ``gib`` GiB free."""
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")
