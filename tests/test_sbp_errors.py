# ruff: noqa: E501 (messages stand here whole, as the user reads them)
"""Every error of placements, sbp and layouts, word for word."""

import copy
import pickle

import jax
import numpy as np
import pytest

import oneflax.sbp as sbp
from oneflax.sbp import Fault, FlowError, PlanError, S, SbpError, ScheduleError, check_layout, placement

GRID = placement("cpu", [[3, 1], [0, 2]], axes=("data", "model"))
LINE = placement("cpu", [0, 1])
WORDS = "B NdSbp P S as_nd_sbp canonical named_sharding parse_nd_sbp parse_sbp part_shape partition_spec placement"
NAMES = {word: getattr(sbp, word) for word in WORDS.split()} | {"np": np, "GRID": GRID, "LINE": LINE}

PLACEMENTS = {
    'placement("cdua", [0])': """\
placement("cdua"): "cdua" is not a device type.
  Mend: placement("cuda", ...); the device types are "cpu", "cuda", "tpu" or "auto".""",
    'placement("metal")': """\
placement("metal"): "metal" is not a device type.
  Mend: use "cpu", "cuda", "tpu" or "auto".""",
    "placement(3)": """\
placement(3): 3 is not a device type.
  Mend: use "cpu", "cuda", "tpu" or "auto".""",
    'placement("cpu", [])': """\
placement("cpu"): a placement has at least one rank.
  ranks []
  Mend: placement(..., [0]).""",
    'placement("cpu", [[0, 1], [2]])': """\
placement("cpu"): the ranks do not form a rectangular grid.
  ranks [[0, 1], [2]]
  Mend: make all rows equally long, as in [[0, 1], [2, 3]].""",
    'placement("cpu", [0, [1, 2]])': """\
placement("cpu"): the ranks do not form a rectangular grid.
  ranks [0, [1, 2]]
  Mend: make all rows equally long, as in [[0, 1], [2, 3]].""",
    'placement("cpu", [[0], []])': """\
placement("cpu"): the ranks do not form a rectangular grid.
  ranks [[0], []]
  Mend: make all rows equally long, as in [[0, 1], [2, 3]].""",
    'placement("cpu", [0, 0, -1, 1.5, True])': """\
placement("cpu"): a rank is a whole number from 0 on, not -1, 1.5, True.
  ranks [0, 0, -1, 1.5, True]
  Mend: give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]].""",
    'placement("cpu", [2, 0, 2])': """\
placement("cpu"): a rank is one device, but rank 2 is given more than once.
  ranks [2, 0, 2]
  Mend: name each rank once.""",
    'placement("cpu", np.array([0.0, 1.0]))': """\
placement("cpu"): a rank is a whole number from 0 on, not 0.0, 1.0.
  ranks [0.0, 1.0]
  Mend: give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]].""",
    'placement("cpu", {0: [0, 1]})': """\
placement("cpu"): a rank is a whole number from 0 on, not {0: [0, 1]}.
  ranks {0: [0, 1]}
  Mend: give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]].""",
    'placement("cpu", "0-3")': """\
placement("cpu"): a rank is a whole number from 0 on, not '0-3'.
  ranks '0-3'
  Mend: give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]].""",
    'placement("cpu", [-1], axes=("a", "b"))': """\
placement("cpu"): a rank is a whole number from 0 on, not -1.
  ranks [-1]
  Mend: give nested lists of ranks, as in [0, 1] or [[0, 1], [2, 3]].""",
    'placement("cpu", [0, 1], axes=("data", "model"))': """\
placement("cpu"): 2 axis names for ranks of 1 placement axis.
  axes ("data", "model")    shape (2,)
  Mend: one name for each level of nesting of the ranks.""",
    'placement("cpu", [[0, 1]], axes=("data",))': """\
placement("cpu"): 1 axis name for ranks of 2 placement axes.
  axes ("data")    shape (1, 2)
  Mend: one name for each level of nesting of the ranks.""",
    'placement("cpu", [[0, 1]], axes=("data", "data"))': """\
placement("cpu"): two placement axes have one name.
  axes ("data", "data")    shape (1, 2)
  Mend: give each placement axis its own.""",
    'placement("cpu", [[0, 1]], axes=("my axis", 3))': """\
placement("cpu"): an axis name is a word of letters, digits and _, not "my axis", 3.
  axes ("my axis", 3)    shape (1, 2)
  Mend: axes=("data", "model"), for example.""",
    'placement("cpu", rank=[0, 1])': """\
placement("cpu"): the size of placement axis 'rank' is a whole number from 1 on, or -1, not [0, 1].
  Mend: did you mean ranks=?""",
    'placement("cpu", [0, 1], data=2)': """\
placement("cpu"): ranks and sizes (data=2) cannot be given together.
  Mend: sizes alone, or ranks with axes=("data", "model").""",
    'placement("cpu", axes=("data",), data=2)': """\
placement("cpu"): axes and sizes (data=2) cannot be given together.
  Mend: sizes alone, or ranks with axes=("data", "model").""",
    'placement("cpu", [0, 1], axis=("data",))': """\
placement("cpu"): ranks and sizes (axis=('data',)) cannot be given together.
  Mend: did you mean axes=?""",
    'placement("cpu", data=0, model=2.0)': """\
placement("cpu"): 2 faults
1. placement("cpu"): the size of placement axis 'data' is a whole number from 1 on, or -1, not 0.
     Mend: data=2, or data=-1 for what is left.
2. placement("cpu"): the size of placement axis 'model' is a whole number from 1 on, or -1, not 2.0.
     Mend: model=2, or model=-1 for what is left.""",
    'placement("cpu", data=4, model=4)': """\
placement("cpu"): data=4, model=4 make 16 ranks, but there are 8 cpu ranks.
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=16 and NPROC=32 before jax starts, for 16 virtual devices, \
or placement("cpu", data=-1, model=4).""",
    'placement("cpu", data=2, model=2)': """\
placement("cpu"): data=2, model=2 make 4 ranks, but there are 8 cpu ranks.
  Mend: placement("cpu", data=-1, model=2), or placement("cpu", [[0, 1], [2, 3]], axes=("data", "model")) for some of the ranks.""",
    'placement("cpu", data=3, model=5)': """\
placement("cpu"): data=3, model=5 make 15 ranks, but there are 8 cpu ranks.
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=15 and NPROC=32 before jax starts, for 15 virtual devices.""",
    'placement("cpu", data=-1, model=3)': """\
placement("cpu"): data=-1, model=3: the 8 cpu ranks do not divide by 3.
  Mend: choose sizes whose product divides 8.""",
    'placement("cpu", data=-1, model=-1)': """\
placement("cpu"): one placement axis can take what is left, not 2 (data, model).
  Mend: give all sizes but one.""",
    'placement("tpu")': """\
placement("tpu"): there are no tpu devices here; jax runs on cpu.
  Mend: placement("auto", ...) takes what is there; for tpu: pip install "jax[tpu]", and JAX_PLATFORMS must not exclude it.""",
    'placement("cuda", data=2)': """\
placement("cuda"): there are no cuda devices here; jax runs on cpu.
  Mend: placement("auto", ...) takes what is there; for cuda: pip install "jax[cuda13]" (or cuda12), and JAX_PLATFORMS must not exclude it.""",
    'placement("cuda", [0]).mesh': """\
placement("cuda"): there are no cuda devices here; jax runs on cpu.
  Mend: placement("auto", ...) takes what is there; for cuda: pip install "jax[cuda13]" (or cuda12), and JAX_PLATFORMS must not exclude it.""",
    'placement("cpu", [7, 8, 9]).mesh': """\
placement.mesh: there are 8 cpu ranks here, only ranks 0 to 7 exist: no rank 8, 9.
  placement cpu[7, 8, 9]
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=10 before jax starts, or call jax.config.update("jax_num_cpu_devices", 10) first.""",
    'placement("cpu", range(4, 20)).mesh': """\
placement.mesh: there are 8 cpu ranks here, only ranks 0 to 7 exist: no rank 8, 9, 10, 11, 12, 13, 14, 15 and 4 more.
  placement cpu[4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=20 before jax starts, or call jax.config.update("jax_num_cpu_devices", 20) first.""",
    "GRID.at(datas=0, model=2)": """\
placement.at(datas=0, model=2): 2 faults
1. placement.at(datas=0, model=2): there is no placement axis 'datas'; the placement axes are data, model.
     placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: use 'data'.
2. placement.at(datas=0, model=2): placement axis 'model' (size 2) has no index 2.
     placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: use a whole number from -2 to 1.""",
    'GRID.at(model="0")': """\
placement.at(model='0'): placement axis 'model' (size 2) has no index '0'.
  placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: use a whole number from -2 to 1.""",
    'GRID.axis_index("mdel")': """\
placement.axis_index("mdel"): there is no placement axis 'mdel'; the placement axes are data, model.
  placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: use 'model'.""",
    "GRID.axis_index(2)": """\
placement.axis_index(2): there is no placement axis 2; the placement axes are data, model.
  placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: use a name, or use an index from 0 to 1.""",
    'LINE.axis_index("data")': """\
placement.axis_index("data"): there is no placement axis 'data'; 1 placement axis has no name.
  placement cpu[0, 1]
  Mend: give names with axes=(...), or use the index 0.""",
}

SIGNATURES = {
    'S("vocab")': """\
S("vocab"): a tensor axis is a whole number, not str.
  Mend: S(0), or S(-1).""",
    "S(True)": """\
S(True): a tensor axis is a whole number, not bool.
  Mend: S(0), or S(-1).""",
    "S(np.bool_(True))": """\
S(np.True_): a tensor axis is a whole number, not bool.
  Mend: S(0), or S(-1).""",
    "S(1.0)": """\
S(1.0): a tensor axis is a whole number, not float.
  Mend: S(0), or S(-1).""",
    "S(None)": """\
S(None): a tensor axis is a whole number, not NoneType.
  Mend: S(0), or S(-1).""",
    'P("mean")': """\
P("mean"): a partial is of kind "sum", "max" or "min".
  Mend: P, P("max") or P("min").""",
    "P(0)": """\
P(0): a partial is of kind "sum", "max" or "min".
  Mend: P, P("max") or P("min").""",
    'parse_sbp("S[0]")': """\
parse_sbp: "S[0]" is not an sbp.
  Mend: write S(0), S(-1), B, P, P("max") or P("min").""",
    'parse_nd_sbp("(S(0), Q)")': """\
parse_nd_sbp: "Q" is not an sbp.
  Mend: write S(0), S(-1), B, P, P("max") or P("min").""",
    'parse_nd_sbp("()")': """\
parse_nd_sbp: an nd-sbp has one sbp for each placement axis, and none is given.
  Mend: (B,), or (S(0), B).""",
    'parse_nd_sbp("(S(0), , Q)")': """\
parse_nd_sbp: 2 faults
1. parse_nd_sbp: "" is not an sbp.
     Mend: write S(0), S(-1), B, P, P("max") or P("min").
2. parse_nd_sbp: "Q" is not an sbp.
     Mend: write S(0), S(-1), B, P, P("max") or P("min").""",
    'placement("cpu", [[0, 1]]).at(data=0)': """\
placement.at(data=0): there is no placement axis 'data'; 2 placement axes have no names.
  placement cpu[[0, 1]]
  Mend: give names with axes=(...), or use an index from 0 to 1.""",
    "NdSbp(())": """\
NdSbp: an nd-sbp has one sbp for each placement axis, and none is given.
  Mend: (B,), or (S(0), B).""",
    'NdSbp((B, "S(0)"))': """\
NdSbp: an sbp is S(0), S(-1), B, P, P("max") or P("min"), not str.
  given 'S(0)'
  Mend: NdSbp((S(0), B)).""",
    "NdSbp((S(2), B, S(-3))).resolve(2)": """\
resolve(ndim=2): 2 faults
1. resolve(ndim=2): S(2) over placement axis 0: there is no tensor axis 2; they are 0 to 1.
     nd-sbp (S(2), B, S(-3))
     Mend: S(0) to S(1), or B.
2. resolve(ndim=2): S(-3) over placement axis 2: there is no tensor axis -3; they are 0 to 1.
     nd-sbp (S(2), B, S(-3))
     Mend: S(0) to S(1), or B.""",
    "NdSbp((S(0),)).resolve(0)": """\
resolve(ndim=0): S(0) over placement axis 0: a tensor without tensor axes cannot be split.
  nd-sbp S(0)
  Mend: B.""",
    "NdSbp((S(1),)).resolve(1)": """\
resolve(ndim=1): S(1) over placement axis 0: there is no tensor axis 1; the only one is 0.
  nd-sbp S(1)
  Mend: S(0) or B.""",
    "as_nd_sbp(S(0), GRID)": """\
sbp=: 1 sbp for 2 placement axes.
  nd-sbp S(0)    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(S(0), B).""",
    "as_nd_sbp((B, B, S(0)), GRID)": """\
sbp=: 3 sbp for 2 placement axes.
  nd-sbp (B, B, S(0))    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(B, B).""",
    'as_nd_sbp((B, B), LINE, "zeros(sbp=)")': """\
zeros(sbp=): 2 sbp for 1 placement axis.
  nd-sbp (B, B)    placement cpu[0, 1]
  Mend: sbp=B.""",
    "as_nd_sbp((), GRID)": """\
sbp=: an nd-sbp has one sbp for each placement axis, and none is given.
  Mend: (B,), or (S(0), B).""",
    "as_nd_sbp(None, GRID)": """\
sbp=: an sbp is S(0), S(-1), B, P, P("max") or P("min"), not NoneType.
  given None
  Mend: sbp=(S(0), B), sbp="(S(0), B)" or sbp={"data": S(0)}.""",
    'as_nd_sbp([3, "Q"], GRID)': """\
sbp=: 2 faults
1. sbp=: an sbp is S(0), S(-1), B, P, P("max") or P("min"), not int.
     given 3
     Mend: sbp=(S(0), B), sbp="(S(0), B)" or sbp={"data": S(0)}.
2. sbp=: "Q" is not an sbp.
     Mend: write S(0), S(-1), B, P, P("max") or P("min").""",
    'as_nd_sbp("(S(0), Q)", GRID, "zeros(sbp=)")': """\
zeros(sbp=): "Q" is not an sbp.
  Mend: write S(0), S(-1), B, P, P("max") or P("min").""",
    'as_nd_sbp({"mdel": S(0), "data": 3}, GRID)': """\
sbp=: 2 faults
1. sbp=: there is no placement axis 'mdel'; the placement axes are data, model.
     placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: use 'model'.
2. sbp=: an sbp is S(0), S(-1), B, P, P("max") or P("min"), not int.
     given 3
     Mend: sbp=(S(0), B), sbp="(S(0), B)" or sbp={"data": S(0)}.""",
    "as_nd_sbp({2: B}, GRID)": """\
sbp=: there is no placement axis 2; the placement axes are data, model.
  placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: use a name, or use an index from 0 to 1.""",
    'as_nd_sbp({"data": B}, LINE)': """\
sbp=: there is no placement axis 'data'; 1 placement axis has no name.
  placement cpu[0, 1]
  Mend: give names with axes=(...), or use the index 0.""",
}

LAYOUTS = {
    'named_sharding((6, 7), (B, S(1)), GRID, "w")': """\
named_sharding(w): tensor axis 1 of w (size 7) does not split evenly over placement axis 'model' (size 2).
  w: [6, 7] (B, S(1)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(B, B), or pad tensor axis 1 to 8.""",
    'named_sharding((6, 8), (S(0), S(0)), GRID, "w")': """\
named_sharding(w): tensor axis 0 of w (size 6) does not split evenly over placement axis 'data' (size 2) and placement axis 'model' (size 2), 4 parts together.
  w: [6, 8] (S(0), S(0)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(S(0), B), or pad tensor axis 0 to 8.""",
    "named_sharding((5, 7), (S(0), S(-1)), GRID)": """\
named_sharding(tensor): 2 faults
1. named_sharding(tensor): tensor axis 0 of tensor (size 5) does not split evenly over placement axis 'data' (size 2).
     tensor: [5, 7] (S(0), S(-1)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, B), or pad tensor axis 0 to 6.
2. named_sharding(tensor): tensor axis 1 of tensor (size 7) does not split evenly over placement axis 'model' (size 2).
     tensor: [5, 7] (S(0), S(-1)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, B), or pad tensor axis 1 to 8.""",
    "named_sharding((5,), S(0), LINE)": """\
named_sharding(tensor): tensor axis 0 of tensor (size 5) does not split evenly over placement axis 0 (size 2).
  tensor: [5] S(0) placement cpu[0, 1]
  Mend: sbp=B, or pad tensor axis 0 to 6.""",
    'named_sharding((6, 7), (P, S(1)), GRID, "w")': """\
named_sharding(w): 2 faults
1. named_sharding(w): tensor axis 1 of w (size 7) does not split evenly over placement axis 'model' (size 2).
     w: [6, 7] (P, S(1)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(P, B), or pad tensor axis 1 to 8.
2. named_sharding(w): P over placement axis 'data' (size 2) is not a sharding: every rank holds an addend as large as the whole, and this call gives no such storage.
     w: [6, 7] (P, S(1)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, S(1)) for the value itself.""",
    'named_sharding((4,), (P("max"), P("min")), GRID)': """\
named_sharding(tensor): 2 faults
1. named_sharding(tensor): P("max") over placement axis 'data' (size 2) is not a sharding: every rank holds an operand as large as the whole, and this call gives no such storage.
     tensor: [4] (P("max"), P("min")) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, B) for the value itself.
2. named_sharding(tensor): P("min") over placement axis 'model' (size 2) is not a sharding: every rank holds an operand as large as the whole, and this call gives no such storage.
     tensor: [4] (P("max"), P("min")) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, B) for the value itself.""",
    'named_sharding((4,), (S(1), S(-2)), GRID, "bias")': """\
named_sharding(bias): 2 faults
1. named_sharding(bias): S(1) over placement axis 'data' (size 2): there is no tensor axis 1; the only one is 0.
     bias: [4] (S(1), S(-2)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: S(0) or B.
2. named_sharding(bias): S(-2) over placement axis 'model' (size 2): there is no tensor axis -2; the only one is 0.
     bias: [4] (S(1), S(-2)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: S(0) or B.""",
    "named_sharding((4,), S(0), GRID)": """\
named_sharding(tensor): 1 sbp for 2 placement axes.
  nd-sbp S(0)    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(S(0), B).""",
    'named_sharding((16,), S(0), placement("cpu", [0, 8]))': """\
placement.mesh: there are 8 cpu ranks here, only ranks 0 to 7 exist: no rank 8.
  placement cpu[0, 8]
  Mend: set XLA_FLAGS=--xla_force_host_platform_device_count=9 before jax starts, or call jax.config.update("jax_num_cpu_devices", 9) first.""",
    "partition_spec((P, S(3)), GRID, 2)": """\
partition_spec: 2 faults
1. partition_spec: S(3) over placement axis 'model' (size 2): there is no tensor axis 3; they are 0 to 1.
     nd-sbp (P, S(3))    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: S(0) to S(1), or B.
2. partition_spec: P over placement axis 'data' (size 2) is not a sharding: every rank holds an addend as large as the whole, and this call gives no such storage.
     nd-sbp (P, S(3))    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: sbp=(B, S(3)) for the value itself.""",
    "partition_spec((B,), GRID, 2)": """\
partition_spec: 1 sbp for 2 placement axes.
  nd-sbp B    placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(B, B).""",
    "part_shape((), (B, S(0)), GRID)": """\
part_shape(tensor): S(0) over placement axis 'model' (size 2): a tensor without tensor axes cannot be split.
  tensor: [] (B, S(0)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: B.""",
    'part_shape((3,), {"model": S(0)}, GRID, "bias")': """\
part_shape(bias): tensor axis 0 of bias (size 3) does not split evenly over placement axis 'model' (size 2).
  bias: [3] (B, S(0)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
  Mend: sbp=(B, B), or pad tensor axis 0 to 4.""",
    'canonical((4, 4), (S(2), S(-3)), GRID, "w")': """\
sbp of w: 2 faults
1. sbp of w: S(2) over placement axis 'data' (size 2): there is no tensor axis 2; they are 0 to 1.
     w: [4, 4] (S(2), S(-3)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: S(0) to S(1), or B.
2. sbp of w: S(-3) over placement axis 'model' (size 2): there is no tensor axis -3; they are 0 to 1.
     w: [4, 4] (S(2), S(-3)) placement cpu[[3, 1], [0, 2]] (data=2, model=2)
     Mend: S(0) to S(1), or B.""",
}


@pytest.mark.parametrize(("code", "message"), [*PLACEMENTS.items(), *SIGNATURES.items(), *LAYOUTS.items()])
def test_whole_message(code: str, message: str) -> None:
    with pytest.raises(SbpError) as caught:
        eval(code, NAMES)
    assert str(caught.value) == message


def test_all_faults_can_be_collected() -> None:
    faults = check_layout((5, 7), "(S(0), S(1))", GRID, "w", "place")
    assert [fault.what for fault in faults] == [
        "tensor axis 0 of w (size 5) does not split evenly over placement axis 'data' (size 2).",
        "tensor axis 1 of w (size 7) does not split evenly over placement axis 'model' (size 2).",
    ]
    assert check_layout((4, 8), "(S(0), S(1))", GRID) == []
    assert check_layout((4, 8), (sbp.P, sbp.B), GRID, partial=True) == []
    assert [fault.where for fault in check_layout((4,), sbp.B, GRID, "w", "place")] == ["place(w)"]


def test_a_platform_that_is_no_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    with pytest.raises(SbpError) as caught:
        placement("auto")
    assert (
        str(caught.value)
        == """\
placement("auto"): jax chose the platform "METAL", which is none of cpu, cuda and tpu.
  Mend: placement("cpu", ...), or set JAX_PLATFORMS before jax starts."""
    )


def test_missing_ranks_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform: ["the only one"])
    with pytest.raises(SbpError) as caught:
        _ = placement("gpu", [0, 1]).mesh
    assert (
        str(caught.value)
        == """\
placement.mesh: there is 1 cuda rank here, only rank 0 exists: no rank 1.
  placement cuda[0, 1]
  Mend: placement("cuda") for all that exist, or start more processes."""
    )


def test_the_mend_for_missing_cpu_ranks_counts_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(SbpError, match="device_count=5 before"):
        _ = placement("cpu", [0, 12]).mesh


def test_an_unsupported_jax_is_refused_at_import() -> None:
    from oneflax.sbp import _compat

    for version in ((0, 10, 2), (0, 11, 0), (0, 12, 0, 1), (0, 12, 9)):
        _compat.check_version("", version)
    for version in ((0, 10, 1), (0, 9, 9), (0, 13, 0), (1, 0, 0)):
        text = ".".join(map(str, version))
        with pytest.raises(ImportError) as caught:
            _compat.check_version(text, version)
        assert str(caught.value) == (
            f'oneflax needs jax >= 0.10.2 and < 0.13, but finds jax {text}. Mend: pip install "jax>=0.10.2,<0.13"'
        )


@pytest.mark.parametrize("error", [FlowError, SbpError, PlanError, ScheduleError])
@pytest.mark.parametrize("count", [1, 3])
def test_errors_pickle_and_copy(error: type[FlowError], count: int) -> None:
    faults = [Fault(f"call({i})", "is wrong.", ("a: float32[4] B",), "b") for i in range(count)]
    for made in (error(faults, "calls"), error(faults), error(faults[0])):
        made.add_note("on worker 3")
        for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
            assert type(again) is error
            assert (str(again), again.faults, again.where) == (str(made), made.faults, made.where)
            assert again.__notes__ == ["on worker 3"]


@pytest.mark.parametrize(
    ("mend", "want"),
    [
        ("sbp=(S(0), B).", "batch=(S(0), B)."),
        ('sbp=B, sbp=S(-1), or sbp=P("max").', 'batch=B, batch=S(-1), or batch=P("max").'),
        ('sbp="(S(0), B)" or sbp={"data": S(0)}.', 'batch="(S(0), B)" or batch={"data": S(0)}.'),
        ("sbp=(B, B), or pad tensor axis 1 to 8.", "batch=(B, B), or pad tensor axis 1 to 8."),
        ("use 'data'.", "use 'data'."),
    ],
)
def test_a_mend_names_the_argument_of_the_call(mend: str, want: str) -> None:
    assert Fault("f", "is wrong.", ("a",), mend).as_argument("batch={}") == Fault("f", "is wrong.", ("a",), want)


def test_a_known_dtype_is_told() -> None:
    with pytest.raises(SbpError, match=r"\n  w: bfloat16\[3\] S\(0\) placement"):
        sbp.part_shape((3,), S(0), placement("cpu", [0, 1]), "w", "bfloat16")
    with pytest.raises(SbpError, match=r"\n  w: float32\[3\] S\(1\) placement"):
        sbp.canonical((3,), S(1), placement("cpu", [0, 1]), "w", np.dtype("float32"))
