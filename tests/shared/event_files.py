"""TensorBoard's view of a run, read from its event files."""

from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def events(workdir: Path) -> list[Event]:
    """All events, in TensorBoard's order; one is length (8), checksum (4), event, checksum (4)."""
    found = []
    for file in sorted((workdir / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            end = 12 + int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12:end]))
            data = data[end + 4 :]
    return found


def shown(workdir: Path) -> list[tuple[int, str, float | str]]:
    """Scalars and texts: a restart at a step hides what came before from that step on."""
    found: list[tuple[int, str, float | str]] = []
    for event in events(workdir):
        if event.session_log.status == SessionLog.START:
            found = [each for each in found if each[0] < event.step]
        for value in event.summary.value:
            text = value.tensor.string_val
            found.append((event.step, value.tag, text[0].decode() if text else value.simple_value))
    return found
