"""Two nodes on one machine with a Ray cluster over both, for jobs on several nodes without a GPU.

    python -m scripts.two_nodes --shared FOLDER -- COMMAND...

runs COMMAND on the first node, which is the cluster's head; COMMAND joins the cluster by `RAY_ADDRESS`. A node is a set
of Linux namespaces: a network with an address of its own, mounts with a /tmp and a /dev/shm of its own, processes, and
a host name. The first node has a bridge, as if it were the switch too, and a veth pair leads from there to the second
node; nothing joins them to this machine's network. The rest of the disk
is the same on both nodes, as with a shared file system; of /tmp both see the folders given by `--shared`.

    this process ══ pipe ══> first process of a node ──> Ray and everything else on this node

The first process of a node ends when the pipe closes, whatever has ended this process. Then the kernel ends all
processes of the node and removes its mounts and its network, so nothing is left behind. This needs root, and the
packages util-linux and iproute2 of Debian.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from partial_rollout.run.cpu_environment import apply_cpu_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("node-1", "node-2", "node-3")
ADDRESSES = ("10.231.7.1", "10.231.7.2", "10.231.7.3")
"""Seen by nobody but these nodes. The third one is for a node that comes after the second one's death."""
PREFIX_LENGTH = 24
RAY_PORT = 6379
TOOLS = ("unshare", "nsenter", "mount", "hostname", "ip")
PACKAGES = "util-linux hostname iproute2"
CALL_S = 30.0
"""Making a namespace or a mount takes milliseconds."""
RAY_S = 180.0
"""`ray start` takes ten seconds, and much longer on a busy machine."""
END_S = 60.0
"""A command that Ctrl-C has reached may save a checkpoint; a node itself ends at once."""
SHM_BYTES = 4 << 30
OBJECT_STORE_BYTES = 400 << 20
"""Object store of each node, in the node's /dev/shm, where weight buffers are too."""
LOGICAL_CPUS = 32
TMP = Path("/tmp")
READY = "ready"
MAKE_MOUNTS = """
set -e
hostname {name}
mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
chmod 1777 /mnt /dev/shm
printf '127.0.0.1 localhost\\n{hosts}' > /mnt/.hosts
: > /mnt/.resolv
mount --bind /mnt/.hosts /etc/hosts
mount --bind /mnt/.resolv /etc/resolv.conf
{shares}
mount --move /mnt /tmp
echo {ready}
cat > /dev/null
exit 0
"""
"""What the first process of a node does. The new /tmp is made elsewhere, because it shows folders of the old one.
gloo finds the address of its node by the host name, so both names are in /etc/hosts. No name server can be reached:
without one that is written down, a search for a name ends at once. `cat` ends when the pipe closes; the shell collects
processes whose parents have ended."""


class NodeError(RuntimeError):
    """The nodes could not be made, or Ray did not start on them."""


@dataclass(frozen=True)
class Node:
    """A set of namespaces, and the way into it."""

    name: str
    address: str
    pid: int
    """Pid of the node's first process, as this machine counts."""
    variables: Mapping[str, str]
    """Variables of the node's commands, added to those of this process."""

    def command(self, *words: str, cwd: Path = ROOT) -> list[str]:
        """`words` as a command on this node, in the folder `cwd` as this node sees it.

        Ctrl-C in a terminal reaches the command itself; the processes before it wait for its end.
        """
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", "--pid", "--"]
        return ["env", "--ignore-signal=INT", *enter, "env", "--default-signal=INT", f"--chdir={cwd}", *words]

    def run(self, *words: str, limit_s: float = CALL_S) -> str:
        """Run a command to its end; returns its output.

        Raises:
            NodeError: it failed, or did not end within `limit_s`.
        """
        return _run(self.command(*words), limit_s, self.variables)

    def kill(self) -> None:
        """End all of its processes at once, as when a machine loses its power; its network goes with them."""
        os.kill(self.pid, signal.SIGKILL)

    def popen(
        self,
        *words: str,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command; its stderr goes where its stdout goes."""
        return subprocess.Popen(
            self.command(*words, cwd=cwd),
            env=os.environ | dict(self.variables) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
        )


def why_not() -> str:
    """What this machine lacks for two nodes; empty if they can be made."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not found: {', '.join(missing)}. Install them: apt-get install {PACKAGES}"
    try:
        _run(["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
    except NodeError as error:
        return f"Linux namespaces are not allowed here: {error}. They need root, and in a container CAP_SYS_ADMIN"
    return ""


@contextlib.contextmanager
def two_nodes(shared: Sequence[Path] = ()) -> Iterator[tuple[Node, Node]]:
    """Two joined nodes without Ray; all processes on them end with this context.

    Args:
        shared: folders below /tmp that both nodes see.

    Raises:
        NodeError: this machine does not allow it, or lacks a command.
    """
    if reason := why_not():
        raise NodeError(reason)
    with _node(NAMES[0], ADDRESSES[0], shared) as head:
        _make_switch(head)
        with second_node(head, shared) as other:
            yield head, other


@contextlib.contextmanager
def second_node(head: Node, shared: Sequence[Path] = (), *, place: int = 1) -> Iterator[Node]:
    """The node beside `head`, without Ray; `place` 2 is another one, for the time after its death.

    Raises:
        NodeError: it could not be made.
    """
    with _node(NAMES[place], ADDRESSES[place], shared) as other:
        _plug_in(head, other)
        yield other


@contextlib.contextmanager
def ray_cluster(nodes: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    """A Ray cluster over all nodes, the first one its head, with one logical GPU each; yields nodes that know of it.

    It ends with the nodes.

    Raises:
        NodeError: Ray did not start.
    """
    token = secrets.token_hex(32)  # as `ray get-auth-token` has made it on a user's nodes
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(ROOT)}
    head = replace(nodes[0], variables={"RAY_ADDRESS": f"{nodes[0].address}:{RAY_PORT}", **variables})
    _start_ray(head, "--head", f"--port={RAY_PORT}", "--include-dashboard=False")
    yield head, *(join_cluster(head, node) for node in nodes[1:])


def join_cluster(head: Node, node: Node) -> Node:
    """Start Ray on a node, in the cluster of `head`; returns a node that knows of the cluster.

    Raises:
        NodeError: Ray did not start.
    """
    joined = replace(node, variables=head.variables)
    _start_ray(joined, f"--address={head.variables['RAY_ADDRESS']}")
    return joined


def _start_ray(node: Node, *role: str) -> None:
    node.run(
        sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={node.address}",
        f"--num-cpus={LOGICAL_CPUS}", "--num-gpus=1", f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats", limit_s=RAY_S,
    )  # fmt: skip


@contextlib.contextmanager
def _node(name: str, address: str, shared: Sequence[Path]) -> Iterator[Node]:
    hosts = "".join(f"{each} {other}\\n" for each, other in zip(ADDRESSES, NAMES, strict=True))
    script = MAKE_MOUNTS.format(name=name, hosts=hosts, shares=_shares(shared), shm_bytes=SHM_BYTES, ready=READY)
    spaces = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # A session of its own: Ctrl-C reaches this process and the command, and no node before they have ended.
    maker = subprocess.Popen(
        [*spaces, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pipes = [pipe for pipe in (maker.stdin, maker.stdout) if pipe is not None]
    try:
        if maker.stdout is None or maker.stdout.readline().strip() != READY:
            raise NodeError(f"{name}: its mounts could not be made; what failed stands above")
        yield Node(name, address, psutil.Process(maker.pid).children()[0].pid, {})
    finally:
        for pipe in pipes:
            pipe.close()
        _end(maker)


def _end(maker: subprocess.Popen[str]) -> None:
    """Wait for the node's first process; the kernel has ended all others when it is gone."""
    try:
        maker.wait(END_S)
    except subprocess.TimeoutExpired:
        maker.kill()
        maker.wait(END_S)


def _shares(shared: Sequence[Path]) -> str:
    """Shell commands that show folders of /tmp in the new one; this repository and its interpreter may lie there."""
    needed = {path.resolve() for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared)}
    lines: list[str] = []
    for path in sorted(path for path in needed if path.is_relative_to(TMP)):
        target = shlex.quote(str(Path("/mnt") / path.relative_to(TMP)))
        lines.append(f"mkdir -p {target} && mount --bind {shlex.quote(str(path))} {target}")
    return "\n".join(lines)


def _make_switch(head: Node) -> None:
    """Give the head a bridge with its address: the second node may go, and the head's network stays as it is."""
    head.run("ip", "link", "add", "eth0", "type", "bridge")
    _set_up(head, ADDRESSES[1])


def _plug_in(head: Node, other: Node) -> None:
    """Join the other node by a veth pair, made inside of the head: this machine's own network never sees it."""
    port = f"port-{other.pid}"
    enter = ["nsenter", "--target", str(head.pid), "--net", "--"]
    _run([*enter, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(other.pid)])
    head.run("ip", "link", "set", port, "master", "eth0", "up")
    _set_up(other, head.address)


def _set_up(node: Node, gateway: str) -> None:
    node.run("ip", "address", "add", f"{node.address}/{PREFIX_LENGTH}", "dev", "eth0")
    for link in ("lo", "eth0"):
        node.run("ip", "link", "set", link, "up")
    # Libraries ask for the way to some address of the internet to learn their own; nothing answers there.
    node.run("ip", "route", "add", "default", "via", gateway)


def _run(words: Sequence[str], limit_s: float = CALL_S, variables: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            words,
            env=os.environ | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"{shlex.join(words)} has not ended within {limit_s:g} s: {error.output}") from None
    if done.returncode:
        raise NodeError(f"{shlex.join(words)} ended with code {done.returncode}: {done.stdout.strip()}")
    return done.stdout


def _wait_for_end(job: subprocess.Popen[str]) -> int:
    try:
        return job.wait(END_S)
    except subprocess.TimeoutExpired:
        raise NodeError(f"the command has not ended within {END_S:g} s of Ctrl-C; it ends with its node") from None


def main() -> int:
    """Run a command on the head of two nodes; returns its exit code."""
    parser = argparse.ArgumentParser(description="Run a command on the head node of a Ray cluster over two nodes.")
    parser.add_argument("--shared", type=Path, action="append", default=[], help="a folder of /tmp for both nodes")
    parser.add_argument("command", nargs="+", help="the command, after --")
    asked = parser.parse_args()
    apply_cpu_environment()
    try:
        with two_nodes(asked.shared) as nodes, ray_cluster(nodes) as (head, _):
            job = head.popen(*asked.command, cwd=Path.cwd())
            try:
                return job.wait()
            except KeyboardInterrupt:  # the command got it too, and may save a checkpoint
                return _wait_for_end(job)
    except NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
