"""One Ray cluster carries one run: whoever comes second is told who is there."""

from __future__ import annotations

import os

from partial_rollout.train.resources import TRANSFER_QUEUE, transfer_queue_holder


class Controller:
    """Stands where TransferQueue's controller is looked for."""

    def is_there(self) -> bool:
        """The actor has started."""
        return True


def test_the_run_that_has_the_transfer_queue_is_named(ray_cluster):
    name, namespace = TRANSFER_QUEUE
    assert transfer_queue_holder() is None
    controller = ray_cluster.remote(num_cpus=0)(Controller).options(name=name, namespace=namespace).remote()
    try:
        assert ray_cluster.get(controller.is_there.remote(), timeout=60)
        holder = transfer_queue_holder() or ""
        assert holder.startswith(f"Ray job {ray_cluster.get_runtime_context().get_job_id()} (process {os.getpid()} on ")
    finally:
        ray_cluster.kill(controller)


def test_the_name_is_the_one_that_transfer_queue_uses():
    """The name is a literal in TransferQueue's source."""
    import inspect

    from transfer_queue import interface

    name, namespace = TRANSFER_QUEUE
    assert f'get_actor("{name}", namespace="{namespace}")' in inspect.getsource(interface)
