"""The loss in chunks of tokens on the GPU: several chunks, also of an odd number of tokens, both engines of a chunk."""

import pytest
import torch

from layerplan.integration.engines.manifest import BY_ID
from tests.cases.chunked_loss import hold

LOSSES = [e for e in ("pointwise/inductor", "loss/quack") if BY_ID[e].absent() is None]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("lead", "classes"), [((5, 67), 4096), ((700,), 1000)])
def test_the_loss_in_chunks_is_as_exact_as_pytorch(loss, lead, classes):
    hold("cuda", torch.bfloat16, loss, lead, classes, 256, 128)
