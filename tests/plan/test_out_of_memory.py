"""What a step needs, and what XLA's TPU compiler says, word for word, when there is no room."""

import dataclasses

from lmlib.plan.memory import Counted, out_of_memory

BEFORE_SCHEDULING = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(19.79G) exceeds available HBM (15.75G)."
)
AFTER_SCHEDULING = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 20.63G of 15.48G hbm. Exceeded hbm capacity by 5.15G.

Total hbm usage >= 21.14G:
    reserved        530.00M
    program          20.63G
    arguments            0B

Program hbm requirement 20.63G:
    HLO temp         20.63G (99.9% utilization: Unpadded (20.60G) Padded (20.63G), 0.1% \
fragmentation (22.45M))

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="pmap(train_step)/jit(main)/dot_general" source_file="model.py"
     Shape: bf16[32,2048,32768]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 4.00G
     XLA label: fusion.4 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[8192,32768]{1,0:T(8,128)(2,1)}
     Unpadded size: 512.00M
     ==========================
"""


def test_temporaries_alone_do_not_fit():
    found = out_of_memory(BEFORE_SCHEDULING)
    assert found.temporaries_only
    assert found.needed == round(19.79 * 2**30)
    assert found.largest == ()


def test_all_together_does_not_fit():
    found = out_of_memory(AFTER_SCHEDULING)
    assert not found.temporaries_only
    assert found.needed == round(20.63 * 2**30)
    first, second = found.largest
    assert first.name.startswith("bf16[32,2048,32768]") and "dot_general" in first.name
    assert first.bytes == 4 * 2**30
    assert second.name.startswith("bf16[8192,32768]")
    assert second.bytes == 512 * 2**20


def test_other_errors_are_not_about_memory():
    assert out_of_memory("UNIMPLEMENTED: Stable sorting of more than 2^31-1 elements") is None
    assert out_of_memory("RESOURCE_EXHAUSTED: too many open files") is None


def test_a_step_needs_its_program_beside_what_is_in_use():
    counted = Counted(
        arguments=100, outputs=10, temporaries=1_000, program=7, peak=None, on_host=50
    )
    assert counted.needed == 100 + 10 + 1_000 + 7
    assert dataclasses.replace(counted, peak=600).needed == 600 + 7
