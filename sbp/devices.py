"""Ranks and jax devices: a rank is an index into ``jax.devices(type)``, over all processes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ._compat import AxisType
from .errors import Fault, SbpError
from .grid import Placement

# jax names one platform in several ways; a placement has one word for each kind of device.
_TYPE_OF_PLATFORM = {"cpu": "cpu", "tpu": "tpu", "gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}
_PLATFORM_OF_TYPE = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu"}
_INSTALL = {"cuda": 'pip install "jax[cuda13]" (or cuda12)', "tpu": 'pip install "jax[tpu]"'}


def default_type() -> str:
    """Gives the device type that jax chose: ``"cpu"``, ``"cuda"`` or ``"tpu"``; what ``placement("auto")`` means.

    Raises:
        SbpError: jax chose a platform that is none of these.
    """
    platform = jax.default_backend()
    if platform not in _TYPE_OF_PLATFORM:
        raise SbpError(
            Fault(
                'placement("auto")',
                f'jax chose the platform "{platform}", which is none of cpu, cuda and tpu.',
                mend='placement("cpu", ...), or set JAX_PLATFORMS before jax starts.',
            )
        )
    return _TYPE_OF_PLATFORM[platform]


def devices_of(type: str) -> list[Any]:
    """Gives the ``jax.Device`` of each rank of a type over all processes; rank r stands at index r.

    Raises:
        SbpError: There are none here.
    """
    try:
        return jax.devices(_PLATFORM_OF_TYPE[type])
    except RuntimeError as error:
        raise SbpError(_no_devices_fault(type)) from error


def mesh_of(placement: Placement) -> Mesh:
    """Gives the mesh of a placement: its ranks' devices in the order given, all axes Auto.

    Raises:
        SbpError: There are no devices of the type here, or some of the ranks do not exist.
    """
    devices = devices_of(placement.type)
    missing = [rank for rank in placement.flat if rank >= len(devices)]
    if missing:
        raise SbpError(_missing_fault(placement, missing, len(devices)))
    # An object array by hand: np.array would look into devices that happen to be sequences.
    grid = np.empty(placement.size, dtype=object)
    grid[:] = [devices[rank] for rank in placement.flat]
    return Mesh(grid.reshape(placement.shape), placement.axis_names, axis_types=(AxisType.Auto,) * placement.ndim)


def _no_devices_fault(type: str) -> Fault:
    mend = 'placement("auto", ...) takes what is there'
    if type in _INSTALL:
        mend += f"; for {type}: {_INSTALL[type]}, and JAX_PLATFORMS must not exclude it"
    found = jax.default_backend()
    return Fault(
        f'placement("{type}")',
        f"there are no {type} devices here; jax runs on {found}.",
        mend=mend + ".",
    )


def _missing_fault(placement: Placement, missing: list[int], count: int) -> Fault:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    if count == 1:
        here = f"there is 1 {placement.type} rank here, only rank 0 exists"
    else:
        here = f"there are {count} {placement.type} ranks here, only ranks 0 to {count - 1} exist"
    if placement.type == "cpu":
        # The setting counts the devices of one process.
        needed = -(-(max(missing) + 1) // jax.process_count())
        mend = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax starts, "
            f'or call jax.config.update("jax_num_cpu_devices", {needed}) first.'
        )
    else:
        mend = f'placement("{placement.type}") for all that exist, or start more processes.'
    return Fault(
        "placement.mesh",
        f"{here}: no rank {shown}.",
        (f"placement {placement}",),
        mend,
    )
