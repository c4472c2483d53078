"""Store of simulated checkpoints, shared by all as an object store is; and what befalls it."""

from collections.abc import Sequence
from functools import partial

from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.directives import CheckpointFile
from skein.sim.clock import Clock
from skein.types import Condition, StageSpec


class Store:
    """Files by name: what their writers know of them, with the stage and the lineage inside."""

    def __init__(self, clock: Clock) -> None:
        self.files: dict[str, tuple[CheckpointFile, StageSpec, str]] = {}
        self._clock = clock
        self._damaged: set[str] = set()
        self._full_until = 0.0
        self._hangs_until = 0.0
        self._hidden: set[str] = set()
        self._is_unmounted = False
        self.is_spoilt = False
        """Whether a checkpoint was damaged, not only hidden: then an older one may count."""
        self.has_failed = False
        """Whether checkpoints were damaged, or not read or written for a while: no job may end for it."""

    # --- what befalls it ---

    def damage(self, checkpoint: CheckpointCommitted, number: int, *, seconds: float) -> None:
        """Change one of its files; somebody puts back after so long what was there."""
        self.is_spoilt = True
        names = _names(checkpoint)
        name = names[number % len(names)]
        self._damaged.add(name)
        self._clock.after(seconds, partial(self._damaged.discard, name))

    def hide(self, checkpoint: CheckpointCommitted, *, seconds: float) -> None:
        """Have the files of a checkpoint not be there for so long."""
        self.has_failed = True
        names = _names(checkpoint)
        self._hidden.update(names)
        self._clock.after(seconds, partial(self._hidden.difference_update, names))

    def unmount(self, seconds: float) -> None:
        """Show no file at all, and take no file, for so long."""
        self.has_failed = self._is_unmounted = True
        self._clock.after(seconds, partial(setattr, self, "_is_unmounted", False))

    def fill(self, seconds: float) -> None:
        """Take no more files for so long."""
        self.has_failed = True
        self._full_until = max(self._full_until, self._clock.now + seconds)

    def hang(self, seconds: float) -> None:
        """Answer nobody for so long."""
        self.has_failed = True
        self._hangs_until = max(self._hangs_until, self._clock.now + seconds)

    def delete(
        self, checkpoints: Sequence[CheckpointCommitted], *, but: Sequence[CheckpointCommitted]
    ) -> None:
        """Have the files of checkpoints be no more, unless these others have them too."""
        kept = {name for checkpoint in but for name in _names(checkpoint)}
        for name in {name for checkpoint in checkpoints for name in _names(checkpoint)} - kept:
            self.files.pop(name, None)

    # --- what others see of it ---

    @property
    def hangs(self) -> bool:
        """Whether whoever asks waits in vain."""
        return self._clock.now < self._hangs_until

    def refusal(self) -> str:
        """Reason that a file cannot be written now; "": it can."""
        if self.hangs:
            return "the store does not answer"
        if self._is_unmounted:
            return "the store is not mounted"
        return "the store is full" if self._clock.now < self._full_until else ""

    def trouble(self, checkpoint: CheckpointCommitted) -> str:
        """Reason that a checkpoint cannot be read now; "": it can."""
        if self.hangs:
            return "the store does not answer"
        told = {file.name: self._is_whole(file) for part in checkpoint.stages for file in part.files}
        told |= {f"stage {part.stage}": False for part in checkpoint.stages if not part.files}
        return next((f"{name} is not what was written" for name in sorted(told) if not told[name]), "")

    def _is_whole(self, told: CheckpointFile) -> bool:
        """A file is told of by its writer, who may be wrong about its name, size or tensors."""
        is_there = told.name in self.files and not self._is_unmounted and told.name not in self._hidden
        return is_there and told == self.files[told.name][0] and told.name not in self._damaged

    def look(self, checkpoint: CheckpointCommitted) -> tuple[Condition, str]:
        """Condition that reading all of a checkpoint finds, and its reason."""
        reason = self.trouble(checkpoint)
        if not reason:
            return Condition.WHOLE, ""
        return (Condition.UNKNOWN if self.hangs or self._is_unmounted else Condition.DAMAGED), reason


def _names(checkpoint: CheckpointCommitted) -> list[str]:
    return [file.name for part in checkpoint.stages for file in part.files]
