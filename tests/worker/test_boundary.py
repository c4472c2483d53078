"""The boundary log: what it keeps, where, and what it forgets for want of room."""

from threading import Event

import pytest
import torch

from skein.plan.ops import Direction
from skein.protocol.messages.tensors import Phase, ShardKind, ShardTensor
from skein.protocol.worker.keeping.desk import is_logged
from skein.protocol.worker.ops import HopKey
from skein.types import MicrobatchId, Step, parse_group
from skein.wire.extra import DType
from tests.support.plans import chunk
from tests.support.reports import attempt
from worker.boundary import BoundaryLog, TemporaryFile
from worker.bundle import Bundle, WireTensor, bundle_bytes, to_torch, to_wire

SHARD = ShardTensor(
    kind=ShardKind.PART,
    step=Step(0),
    group=parse_group("s0"),
    attempt=attempt(),
    shard=0,
    member=chunk(0, "w0"),
)


def key(microbatch: int, *, step: int = 0, phase: Phase = Phase.TRAIN) -> HopKey:
    return HopKey(Direction.FORWARD, phase, Step(step), MicrobatchId(microbatch), 1)


def bundle(fill: int, num_bytes: int = 100) -> Bundle:
    """Bytes that tell whose they are, all but the first few."""
    return (WireTensor(name="x", dtype=DType.UINT8, shape=(num_bytes,), data=bytes([fill]) * num_bytes),)


class FakeDisk(TemporaryFile):
    """A disk in memory, which may be slow or broken."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.data = bytearray()
        self.may_write = Event()
        self.may_write.set()
        self.is_broken = is_broken

    def write(self, offset: int, bundle: Bundle) -> None:
        """See `TemporaryFile`."""
        assert self.may_write.wait(10.0)
        if self.is_broken:
            raise OSError("no space left on device")
        data = b"".join(bytes(tensor.data) for tensor in bundle)
        self.data[offset:] = b"\0" * max(0, offset - len(self.data)) + data

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `TemporaryFile`."""
        data = bytes(self.data[offset : offset + num_bytes])
        if len(data) < num_bytes:
            raise OSError("short read")
        return data

    def truncate(self) -> None:
        """See `TemporaryFile`."""
        self.data.clear()


def bytes_of(found: Bundle | None) -> list[bytes] | None:
    return None if found is None else [bytes(tensor.data) for tensor in found]


def log_of(
    num_entries: int,
    *,
    memory: int = 250,
    disk_bytes: int = 10_000,
    disk: FakeDisk | None = None,
) -> BoundaryLog:
    """Entries of 100 bytes each, numbered; each is on the disk before the next comes, unless that is halted."""
    log = BoundaryLog(memory_bytes=memory, disk_bytes=disk_bytes, disk=disk)
    for number in range(num_entries):
        log.put(key(number), bundle(number))
        if disk is not None and disk.may_write.is_set() and log.num_spilled_bytes:
            written(log)
    return log


def written(log: BoundaryLog) -> None:
    """Wait until the writer has nothing left to do: a job of its own stands behind all others."""
    assert log._writer is not None
    log._writer.submit(int).result(timeout=120)


# --- memory ---


def test_what_was_put_is_found_as_it_was() -> None:
    log, kept = BoundaryLog(), bundle(7)
    assert log.put(key(0), kept) == ()
    assert log.get(key(0)) is kept
    assert log.get(key(1)) is None
    assert log.num_bytes == 100


def test_only_what_crosses_a_boundary_in_training_belongs_here() -> None:
    assert is_logged(key(0))
    assert not is_logged(key(0, phase=Phase.EVALUATE))
    assert not is_logged(SHARD)


def test_what_is_put_again_replaces_what_was_there() -> None:
    log = log_of(1)
    log.put(key(0), bundle(9, num_bytes=50))
    assert bytes_of(log.get(key(0))) == [bytes([9]) * 50]
    assert log.num_bytes == 50


def test_while_memory_has_room_no_file_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> TemporaryFile:
        raise AssertionError("a file was made")

    monkeypatch.setattr("worker.boundary.TemporaryFile", refuse)
    log = log_of(2)
    assert (log.num_bytes, log.num_spilled_bytes) == (200, 0)
    with pytest.raises(AssertionError, match="a file was made"):
        log.put(key(2), bundle(2))


def test_one_entry_that_is_larger_than_all_memory_stays_in_memory() -> None:
    log = BoundaryLog(memory_bytes=10, disk_bytes=0)
    assert log.put(key(0), bundle(0)) == ()
    assert log.get(key(0)) is not None


# --- the disk ---


def test_above_the_budget_the_oldest_go_to_the_disk_and_are_found_there() -> None:
    disk = FakeDisk()
    log = log_of(5, disk=disk)
    written(log)
    assert (log.num_bytes, log.num_spilled_bytes) == (200, 300)
    assert disk.data == b"".join(bytes([n]) * 100 for n in range(3))
    assert [bytes_of(log.get(key(n))) for n in range(5)] == [[bytes([n]) * 100] for n in range(5)]
    log.close()


def test_what_is_being_written_is_read_from_memory() -> None:
    disk = FakeDisk()
    disk.may_write.clear()
    log = log_of(4, disk=disk)
    assert disk.data == b""
    assert [bytes_of(log.get(key(n))) for n in range(4)] == [[bytes([n]) * 100] for n in range(4)]
    disk.may_write.set()
    written(log)
    log.put(key(4), bundle(4))
    assert [bytes_of(log.get(key(n))) for n in range(5)] == [[bytes([n]) * 100] for n in range(5)]
    log.close()


def test_above_both_budgets_the_oldest_in_memory_are_forgotten_and_named() -> None:
    log = BoundaryLog(memory_bytes=250, disk_bytes=150, disk=FakeDisk())
    forgotten = [log.put(key(n), bundle(n)) for n in range(6)]
    # 0 goes to the disk, which has no room for 1; then each newcomer costs the oldest in memory.
    assert forgotten == [(), (), (), (key(1),), (key(2),), (key(3),)]
    assert [log.get(key(n)) is not None for n in range(6)] == [True, False, False, False, True, True]
    assert (log.num_bytes, log.num_spilled_bytes) == (200, 100)
    log.close()


def test_what_a_slow_disk_cannot_take_is_forgotten_before_it_fills_the_memory() -> None:
    disk = FakeDisk()
    disk.may_write.clear()
    log = BoundaryLog(memory_bytes=250, disk=disk)
    forgotten = [log.put(key(n), bundle(n)) for n in range(6)]
    # Two in memory, two that wait for the disk.
    assert forgotten == [(), (), (), (), (key(2),), (key(3),)]
    disk.may_write.set()
    written(log)
    assert log.put(key(6), bundle(6)) == ()
    assert [log.get(key(n)) is not None for n in range(7)] == [True, True, False, False, True, True, True]
    log.close()


def test_one_large_entry_makes_many_small_ones_go() -> None:
    log = log_of(2, disk_bytes=0)
    assert log.put(key(2), bundle(2, num_bytes=240)) == (key(0), key(1))
    assert log.num_bytes == 240


def test_a_write_that_fails_forgets_the_entry_and_gives_its_room_back() -> None:
    disk = FakeDisk(is_broken=True)
    log = log_of(3, disk=disk)
    written(log)
    log.drop_steps(Step(-1))
    assert log.num_spilled_bytes == 0
    assert [log.get(key(n)) is not None for n in range(3)] == [False, True, True]
    log.close()


def test_an_entry_that_a_failed_write_has_cost_is_named_with_the_next_put() -> None:
    disk = FakeDisk(is_broken=True)
    log = log_of(3, disk=disk)
    written(log)
    assert key(0) in log.put(key(3), bundle(3))
    log.close()


def test_what_cannot_be_read_back_is_not_there() -> None:
    disk = FakeDisk()
    log = log_of(3, disk=disk)
    written(log)
    log.put(key(2), bundle(2))
    del disk.data[50:]
    assert log.get(key(0)) is None
    assert log.get(key(2)) is not None
    log.close()


def test_a_real_file_gives_tensors_back_aligned_writable_and_equal_to_the_bit() -> None:
    """The first tensor has an odd number of bytes, so that the second one lies at an odd place of the file."""
    tensors = {
        "mask": torch.tensor([True, False, True]),
        "x": torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        "labels": torch.arange(-3, 4),
        "half": torch.linspace(-1, 1, 7).to(torch.bfloat16),
        "nothing": torch.empty(0, 4),
    }
    kept = tuple(to_wire(name, tensor) for name, tensor in tensors.items())
    log = BoundaryLog(memory_bytes=0)
    log.put(key(0), bundle(0, num_bytes=1))
    log.put(key(1), kept)
    written(log)
    log.put(key(2), bundle(2))
    written(log)
    log.put(key(3), bundle(3))
    found = log.get(key(1))
    assert found is not None
    assert [tensor.meta for tensor in found] == [tensor.meta for tensor in kept]
    for tensor in found:
        again = to_torch(tensor)
        assert torch.equal(again, tensors[tensor.name])
        assert again.data_ptr() % again.element_size() == 0
        if tensor.dtype is not DType.BOOL and len(tensor.data):
            again.zero_()
            assert not any(tensor.data), "the tensor shares the bytes, and may be written to"
    again_found = log.get(key(1))
    assert again_found is not None
    assert bundle_bytes(again_found) == bundle_bytes(kept)
    assert torch.equal(to_torch(again_found[1]), tensors["x"]), "what was read is a copy"
    log.close()


def test_a_real_file_that_lacks_bytes_says_so() -> None:
    disk = TemporaryFile()
    disk.write(3, bundle(7, num_bytes=4))
    assert disk.read(3, 4) == b"\7\7\7\7"
    with pytest.raises(OSError, match="4 of 5 bytes"):
        disk.read(3, 5)
    disk.truncate()
    with pytest.raises(OSError, match="0 of 4"):
        disk.read(3, 4)


# --- the end of a step ---


def test_a_committed_step_goes_and_the_next_one_stays_wherever_it_lies() -> None:
    log = BoundaryLog(memory_bytes=250, disk=FakeDisk())
    for step, number in ((0, 0), (1, 1), (0, 2), (1, 3), (0, 4)):
        log.put(key(number, step=step), bundle(number))
        if log.num_spilled_bytes:
            written(log)
    log.drop_steps(Step(0))
    assert log.num_bytes + log.num_spilled_bytes == 200
    found = [
        log.get(key(number, step=step)) is not None
        for step, number in ((0, 0), (1, 1), (0, 2), (1, 3), (0, 4))
    ]
    assert found == [False, True, False, True, False]
    log.close()


def test_the_file_is_used_from_its_beginning_once_nothing_is_left_in_it() -> None:
    disk = FakeDisk()
    log = log_of(5, disk=disk)
    written(log)
    log.drop_steps(Step(0))
    assert disk.data == b""
    for number in range(3):
        log.put(key(number, step=1), bundle(40 + number))
    written(log)
    assert disk.data == bytes([40]) * 100
    assert bytes_of(log.get(key(0, step=1))) == [bytes([40]) * 100]
    log.close()


def test_what_is_written_late_does_not_overwrite_what_the_next_step_puts_in_its_place() -> None:
    disk = FakeDisk()
    disk.may_write.clear()
    log = log_of(4, disk=disk)
    log.drop_steps(Step(0))
    for number in range(4):
        log.put(key(number, step=1), bundle(40 + number))
    disk.may_write.set()
    written(log)
    log.drop_steps(Step(0))
    assert [bytes_of(log.get(key(n, step=1))) for n in range(4)] == [
        [bytes([40 + n]) * 100] for n in range(4)
    ]
    log.close()


def test_a_forgotten_job_leaves_nothing() -> None:
    log = log_of(5, disk=FakeDisk())
    log.clear()
    assert (log.num_bytes, log.num_spilled_bytes) == (0, 0)
    assert all(log.get(key(n)) is None for n in range(5))
    log.close()
