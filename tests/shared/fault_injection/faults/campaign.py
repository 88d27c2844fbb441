"""The faults of the campaign, and how often each is drawn, in proportion."""

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fault_injection import damage
from fault_injection.faults.data import base_changed, data_changed, teacher_changed
from fault_injection.faults.deletions import (
    checkpoints_deleted,
    half_of,
    lock_deleted,
    metrics_gone,
    workdir_deleted,
    workdir_moved,
)
from fault_injection.faults.disks import (
    LESS_THAN_A_WEIGHT,
    disk_full_for_a_while,
    disk_full_for_good,
    metrics_size,
)
from fault_injection.faults.fault import Fault
from fault_injection.faults.files import damaged, left_behind
from fault_injection.faults.outputs import log_disk_full_for_a_while, reader_closed
from fault_injection.faults.readers import replayed, verified
from fault_injection.faults.signals import (
    asked_to_stop,
    held,
    interrupted_twice,
    killed,
    one_killed,
    prune_killed,
)
from fault_injection.faults.starts import other_code, started_twice
from fault_injection.faults.updates import infinite_update
from fault_injection.job import Job
from fault_injection.moments import (
    ANY_TIME,
    EVALUATING,
    LOADING,
    RESTORING,
    SAVING,
    STARTING,
    STEPPING,
)

OF_ONE_PROCESS = (
    killed(4, STARTING),
    killed(6, RESTORING),
    killed(5, LOADING),
    killed(9, STEPPING),
    killed(9, EVALUATING),
    killed(15, SAVING),
    killed(8, ANY_TIME),
    asked_to_stop(1, signal.SIGTERM, STARTING, -signal.SIGTERM),
    asked_to_stop(2, signal.SIGTERM, LOADING),
    asked_to_stop(4, signal.SIGTERM, STEPPING),
    asked_to_stop(2, signal.SIGTERM, EVALUATING),
    asked_to_stop(3, signal.SIGTERM, SAVING),
    asked_to_stop(3, signal.SIGINT, STEPPING),
    asked_to_stop(2, signal.SIGINT, SAVING),
    interrupted_twice(2, STEPPING),
    interrupted_twice(2, SAVING),
    held(2, STEPPING),
    held(2, SAVING),
    prune_killed(3),
    replayed(1),
    damaged("a bit flipped", 5, damage.flip_a_bit),
    damaged("a block zeroed", 3, damage.zero_a_block),
    damaged("a file cut short", 3, damage.truncate),
    damaged("a file deleted", 3, damage.delete),
    damaged("the manifest deleted", 2, damage.delete_the_manifest),
    damaged("a stray file", 2, damage.add_a_stray_file),
    started_twice("a second start", 4),
    lock_deleted(4),
    workdir_deleted(1),
    workdir_moved(2),
    checkpoints_deleted(2),
    metrics_gone("deleted", 2, Path.unlink),
    metrics_gone("exchanged for half", 2, half_of),
    left_behind("half a line in metrics.jsonl", 2, damage.cut_the_last_line),
    left_behind("tensorboard/ deleted", 2, damage.delete_tensorboard),
    left_behind("half of a new config.json", 2, damage.leave_half_a_config),
    disk_full_for_a_while(4),
    disk_full_for_good("checkpoints", 3, lambda job: LESS_THAN_A_WEIGHT),
    disk_full_for_good("metrics.jsonl", 2, metrics_size),
    reader_closed("the output's reader goes away", 5),
    verified(4),
    infinite_update(5),
    data_changed("shards swapped", 4, damage.swap_shards),
    data_changed("chunks swapped", 3, damage.swap_chunks),
    data_changed("a bit of metadata flipped", 3, damage.flip_a_bit_of_metadata),
    base_changed("a bit flipped", 5, damage.flip_a_bit),
    base_changed("a file deleted", 3, damage.delete),
    teacher_changed("a bit flipped", 8, damage.flip_a_bit_of_teacher),
)
OF_TWO_PROCESSES = (
    one_killed(0),
    one_killed(1),
    started_twice("a second start of 2", 1),
    other_code(1.5),
    log_disk_full_for_a_while(1.5),
    reader_closed("the output's reader goes away, of 2", 1),
)


def draw(faults: tuple[Fault, ...], job: Job, random: Random) -> Iterator[Fault]:
    """Faults for a run, without end; those that it is not ready for are passed over."""
    while True:
        (fault,) = random.choices(faults, [fault.weight for fault in faults])
        if fault.suits(job):
            yield fault
