"""What holds for every test: one thread, and an environment that says nothing about layerplan."""

import os

# Before torch is imported: several workers share few cores, and child processes inherit it. On a GPU it costs nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A developer's own settings must not change what tests see; a test that wants one sets it.
for _name in [n for n in os.environ if n.startswith("LAYERPLAN_")]:
    del os.environ[_name]
