"""Code that stands in what Megatron keeps beside the tensors of a checkpoint is refused, not run."""

from harness import run_ranks


class Evil:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({self.path!r}, 'w').close()",))


def _load(folder):
    from pathlib import Path

    import torch
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from layerplan.integration.megatron.cpu_mode import cpu_mode
    from layerplan.integration.training.checkpoint import load_sharded

    folder, marker = Path(folder) / "checkpoint", Path(folder) / "executed"
    folder.mkdir()
    with cpu_mode():
        torch.distributed.init_process_group("gloo")
        mpu.initialize_model_parallel()

        def state():
            return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=0)}

        dist_checkpointing.save(state() | {"x": Evil(str(marker))}, str(folder))
        marker.unlink(missing_ok=True)
        try:
            load_sharded(folder, state())
            said = "loaded"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said, "executed": marker.exists()}


def test_code_in_a_checkpoints_common_state_is_refused_and_not_run(tmp_path):
    (result,) = run_ranks("test_training_safe_load:_load", world=1, timeout=180, folder=str(tmp_path))
    assert not result["executed"], result["said"]
    assert result["said"] != "loaded"
