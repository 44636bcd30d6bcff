"""What a stream is, in texts: compared with the run of a checkpoint, and with that of other processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..._avals import Array, PyTree, describe_leaf, is_key
from ..._errors import Misuse, Row
from ..._tree import leaves_with_path

Leaf = TypeVar("Leaf", bound=Array | np.ndarray)


def program_of(init: PyTree, **options: object) -> dict[str, str]:
    """What the results depend on, by names: options, and the types of `init`. Of an array there is a digest."""
    said = {name: _said(value) for name, value in options.items()}
    return said | {path: describe_leaf(leaf) for path, leaf in leaves_with_path("init", init)}


def _said(value: object) -> str:
    if not isinstance(value, jax.Array | np.ndarray):
        return str(value)
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        return describe_leaf(value)
    digest = hashlib.sha256(np.ascontiguousarray(bare_of(value)).tobytes()).hexdigest()[:12]
    return f"{describe_leaf(value)}, digest {digest}"


def bare_of(leaf: Leaf) -> Leaf | Array:
    """A leaf as files and processes exchange it: keys as numbers."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_of_all_processes(*trees: PyTree, also: bool = False) -> bool:
    """Whether all of several processes run what reads these arrays, because the devices of all hold them together.

    Args:
        *trees: the arrays.
        also: whether all run it for another reason.
    """
    if jax.process_count() == 1 or also:
        return also and jax.process_count() > 1
    arrays, mesh = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)], mesh_that_is_set()
    devices: list[Any] = [leaf.sharding.device_set for leaf in arrays] + ([] if mesh is None else [mesh.devices.flat])
    return any(len({each.process_index for each in some}) == jax.process_count() for some in devices)


def mesh_that_is_set() -> Mesh | None:
    """The mesh of `jax.set_mesh`, in this thread; None if there is none, or JAX does not tell, as under `jax.grad`."""
    with contextlib.suppress(ValueError):
        mesh = jax.sharding.get_mesh()
        return None if mesh.empty else mesh
    return None


@contextlib.contextmanager
def refused_together(*, is_shared: bool) -> Generator[None]:
    """Within it, a process checks its arguments. If it refuses them, the others hear of it where they `compare`."""
    try:
        yield
    except Exception:
        if is_shared:
            compare(None)
        raise


def compare(program: dict[str, str] | None) -> None:
    """Refuses a run that is another one in another process, in all of them: else one would wait for the others.

    Args:
        program: what the run is; None: this process was refused its arguments, and raises that itself.
    """
    text = json.dumps(program).encode()
    if len(set(_of_all(hashlib.sha256(text).digest()))) == 1:
        return
    size = max(int.from_bytes(each, "big") for each in _of_all(len(text).to_bytes(8, "big")))
    programs: list[dict[str, str] | None] = [json.loads(each) for each in _of_all(text.ljust(size))]
    if program is None:
        return
    given = [each for each in programs if each is not None]
    if len(given) < len(programs):
        says = f"{{call}}: process {programs.index(None)} was refused its arguments, so this one does not begin either."
        raise Misuse(says, "Its own error says why.")
    first = given[0]
    number, other = next((i, each) for i, each in enumerate(given) if each != first)
    none = "(missing)"
    raise Misuse(
        "{call}: processes were given different arguments, and one would wait for another.",
        "Pass the same arguments in all processes. Arrays over several processes have the same shape in each of them.",
        header=("", "process 0", f"process {number}"),
        rows=[
            Row(name, first.get(name, none), other.get(name, none))
            for name in first | other
            if first.get(name) != other.get(name)
        ],
    )


def _of_all(data: bytes) -> list[bytes]:
    """What each process has, of the same number of bytes."""
    with jax.disable_jit(False), jax.no_tracing(False):
        gathered = multihost_utils.process_allgather(np.frombuffer(data, np.uint8))
    return [row.tobytes() for row in np.asarray(gathered)]
