"""Wait until a Ray cluster has at least GPUS GPUs:  wait_for_gpus.py GPUS SECONDS."""

import sys
import time

import ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
found = 0
while found < wanted and time.monotonic() < deadline:
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
        found = int(ray.cluster_resources().get("GPU", 0))
    except (ConnectionError, RuntimeError):
        found = 0
    time.sleep(2)
sys.exit(f"error: Ray has {found} GPUs, the run needs {wanted} (JOIN_TIMEOUT_S)" if found < wanted else 0)
