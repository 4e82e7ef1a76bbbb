"""Who uses the arrays of one shard besides the training thread, and who waits for them.

Owns three users of a shard, and the waits for them. Never touches an array itself.

    user                                            who waits
    an update: writes master, moments and values    gathers, writes, gradients and reads of elements
    a save: reads master, moments and values        updates and writes
    additions to the gradient's sum                 whoever reads the gradient or drops it

Updates and additions are futures of threads, a save is an event. The training thread begins updates, and
autograd's threads additions and early updates. `finish_update` and `leave_sum` forget what they have waited for.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future


class Gate:
    """The users of one shard besides the training thread."""

    def __init__(self) -> None:
        self.reader: threading.Event | None = None
        """Set when the last asynchronous save has copied the shard."""
        self._update: Future[Sequence[Future[None]]] | None = None
        self.adding: Future[None] | None = None
        """The last addition to the gradient's sum; one thread carries them out in order."""

    # ------------------------------------------------------------------------------------------------------ the update

    def begin_update(self, update: "Future[Sequence[Future[None]]]") -> None:
        """Registers an update that ends later, with the tasks that it starts."""
        self._update = update

    def withdraw_update(self) -> None:
        """Forgets an update that will change nothing."""
        self._update = None

    @property
    def has_update(self) -> bool:
        """Whether an update was registered and `finish_update` has not waited for it; it may have ended."""
        return self._update is not None

    @property
    def updating(self) -> bool:
        """Whether an update still runs."""
        update = self._update
        if update is None or not update.done():
            return update is not None
        return update.exception() is None and not all(part.done() for part in update.result())

    def wait_for_update(self) -> None:
        """Blocks until a running update has ended; raises the update's error, each time. For any thread."""
        update = self._update
        if update is not None:
            for part in update.result():
                part.result()

    def finish_update(self) -> None:
        """Blocks until a running update has ended, and forgets it unless it has failed. For whoever runs the step."""
        if self._update is not None:
            self.wait_for_update()
            self._update = None

    def drop_update(self) -> None:
        """Blocks until a running update has ended, and forgets it and its error: all that it writes is replaced."""
        update, self._update = self._update, None
        if update is not None and update.exception() is None:
            for part in update.result():
                part.exception()

    # -------------------------------------------------------------------------------------------------------- the save

    @property
    def being_saved(self) -> bool:
        """Whether an asynchronous save still reads the shard."""
        return self.reader is not None and not self.reader.is_set()

    def wait_for_reader(self) -> None:
        """Blocks until no save reads the shard."""
        if self.reader is not None:
            self.reader.wait()

    def open_for_writing(self) -> None:
        """Blocks until the training thread may change master, moments and values."""
        self.finish_update()
        self.wait_for_reader()

    # --------------------------------------------------------------------------------------------------- the additions

    def finish_sum(self) -> None:
        """Blocks until all additions are in the sum; raises the error of one, each time."""
        if self.adding is not None:
            self.adding.result()

    def leave_sum(self) -> None:
        """Blocks until nobody adds, and forgets the additions and their errors: the sum is dropped."""
        if self.adding is not None:
            self.adding.exception()
            self.adding = None
