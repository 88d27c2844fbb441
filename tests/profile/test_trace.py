"""Traces as XLA's profiler writes them for each platform; see lmlib/profile/trace.py."""

import pytest
from jax.profiler import ProfileData

from lmlib.profile.trace import read_trace

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
# What libtpu adds to every trace once it is loaded, though nothing runs on a TPU.
NOTHING_RAN = plane("/device:CUSTOM:Megascale Trace", "", [])
LAUNCHES = plane("/host:CPU", "Thunk", ["python", "tf_pjrt"])
GPU = plane("/device:GPU:0", "loop_add", ["Stream #13(Compute)", "XLA Ops", "XLA Modules"])
TPU = plane("/device:TPU:0", "%fusion.7 = f32[8]{0} fusion(%x)", ["Steps", "XLA Ops"], stats=False)


@pytest.mark.parametrize(
    ("text", "device", "program"),
    [
        (GPU + LAUNCHES, "/device:GPU:0", "jit_step"),
        (NOTHING_RAN + LAUNCHES + TPU, "/device:TPU:0", ""),
        (NOTHING_RAN + CPU, "/host:CPU", "jit_step"),
    ],
    ids=["gpu", "tpu", "cpu"],
)
def test_what_ran_is_read_once_and_no_launch_of_it(tmp_path, text, device, program):
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    (one,) = read_trace(file)
    assert (one.device, one.program, one.instruction) == (device, program, "fusion.7")
    assert (one.start, one.seconds) == (pytest.approx(2e-6), pytest.approx(3e-6))
