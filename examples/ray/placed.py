"""Asks the cluster hook where an actor should be, and puts it there.

Run it in a Ray cluster whose nodes have sublet's plugin (RAY_ADDRESS says which); SUBLET_CLUSTER and SUBLET_CLUSTER_TOKEN_FILE say where
the hook is.
"""

import os

import ray
import sublet.ray

ray.init(log_to_driver=False, logging_level="WARNING")


@ray.remote(num_cpus=0.1)
class Model:
    def where(self):
        return os.environ["SUBLET_JOB"]


actors = []
for number in range(4):
    # One decision for each actor.
    options = sublet.ray.options(name=f"model{number}", kind="resnet50-b64", mem="5GiB", share=0.4)
    actors.append(Model.options(**options).remote())
    said = options.decision
    print(f"{ray.get(actors[-1].where.remote())} on {said['node']}, slowdown {said['expected_slowdown']:.2f}: {said['reason']}")
