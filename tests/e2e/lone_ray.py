"""`python -m tests.e2e.lone_ray`: Ray with two CPUs on this machine, which ends with its standard input.

Ray forks its processes. Beside the threads that a test's process has by then, such a child may stand still before it is
what it is to be, and Ray gives up.
"""

import sys

import ray


def main() -> None:
    """Starts it, and says where."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
