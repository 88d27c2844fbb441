"""Traces as XLA's profiler writes them for each platform; see lmlib/profile/trace.py."""

from pathlib import Path

import pytest
from jax.profiler import ProfileData

from lmlib.profile.trace import Execution, read_trace

STATISTICS = """
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
"""


def plane(name: str, event: str, lines: list[str], stats: bool = True) -> str:
    """Each line has one event, of 3 µs after 2 µs."""
    named = """
      stats { metadata_id: 1 str_value: "fusion.7" } stats { metadata_id: 2 str_value: "jit_step" }
    """
    written = "".join(
        f"""lines {{ id: {i} name: "{line}" timestamp_ns: 0
          events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 3000000 {named * stats} }} }}"""
        for i, line in enumerate(lines)
    )
    return f"""planes {{ name: "{name}" {written} {STATISTICS}
      event_metadata {{ key: 1 value {{ id: 1 name: "{event}" }} }} }}"""


CPU = plane("/host:CPU", "Thunk", ["tf_XLAExecute"])
# The host's plane beside accelerators: the launches of their kernels.
LAUNCHES = plane("/host:CPU", "Thunk", ["python", "tf_pjrt"])
GPU = plane("/device:GPU:0", "loop_add", ["Stream #13(Compute)", "XLA Ops", "XLA Modules"])
TPU = plane("/device:TPU:0", "%fusion.7 = f32[8]{0} fusion(%x)", ["Steps", "XLA Ops"], stats=False)
# libtpu adds this to every trace once it is loaded, even if nothing runs on a TPU.
EMPTY = plane("/device:CUSTOM:Megascale Trace", "", [])


def read(folder: Path, text: str, platform: str) -> list[Execution]:
    file = folder / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return read_trace(file, platform)


@pytest.mark.parametrize(
    ("text", "platform", "device", "program"),
    [
        (EMPTY + CPU, "cpu", "/host:CPU", "jit_step"),
        (GPU + LAUNCHES, "gpu", "/device:GPU:0", "jit_step"),
        (EMPTY + LAUNCHES + TPU, "tpu", "/device:TPU:0", ""),
    ],
    ids=["cpu", "gpu", "tpu"],
)
def test_executions_are_read_once_without_their_launches(tmp_path, text, platform, device, program):
    (one,) = read(tmp_path, text, platform)
    assert (one.device, one.program, one.instruction) == (device, program, "fusion.7")
    assert (one.start, one.seconds) == (pytest.approx(2e-6), pytest.approx(3e-6))
    assert one.kernel == ("loop_add" if platform == "gpu" else "")


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_launches_are_not_taken_for_kernels_that_the_profiler_did_not_get(tmp_path, platform):
    plane_without = plane(f"/device:{platform.upper()}:0", "", [])
    assert read(tmp_path, plane_without + LAUNCHES, platform) == []
    assert read(tmp_path, LAUNCHES, platform) == []
