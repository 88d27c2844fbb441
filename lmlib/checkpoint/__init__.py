"""Checkpoints of a run: saved asynchronously, verified when read, restored onto any mesh.

One folder per step, `<directory>/<step>`, which is complete or absent:

    state/<leaf>/    one zarr array per leaf of the state, named by the leaf's path
                     (`model.stack.patterns.0.0.attention.query`)
    notes/           a small JSON object of the caller's
    manifest.json    shapes and dtypes of the leaves, the size and the digest of every file

A step is written to `<step>.orbax-checkpoint-tmp-<text>`, with its manifest last, and then renamed.
The text is new each time the directory is opened. A damaged step, found while falling back to an
older one, is renamed to `<step>.damaged`. A step to be deleted is first renamed to
`<step>.orbax-checkpoint-tmp-removed`.
"""

from lmlib.checkpoint.checkpoints import Checkpoints, Restored
from lmlib.checkpoint.failures import DamagedCheckpointError, RemovedCheckpointError

__all__ = ["Checkpoints", "DamagedCheckpointError", "RemovedCheckpointError", "Restored"]
