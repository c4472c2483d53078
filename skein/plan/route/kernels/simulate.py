"""Simulation of one step of a routing, event by event, in exact order: when every op starts, when the step is over.

Rules of this file
- A worker runs one op at a time, to its end: among what is ready what goes home comes first, then what goes out, what
  nobody waits for last; of equals the earlier arrival counts.
- A transfer begins when both the sender's uplink and the receiver's downlink are free of earlier ones; links whose
  `wire_s` is 0 carry any number at once.
- Events of one moment are all taken before any worker starts anew; workers then start in ascending order.
- `op_array` has what each op of a microbatch does, and who waits for it.
"""

import numpy as np

from skein.plan.route.kernels.arrays import AWAITED, FOLLOWERS, LATE, SLOTS
from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.problem import F64, I64

NEVER = np.inf


@compiled
def _push(
    heap_s: F64, heap_number: I64, heap_item: I64, heap_len: int, time: float, number: int, item: int
) -> int:
    """Put an event into the heap; gives how many there are then."""
    at = heap_len
    while at > 0:
        parent = (at - 1) >> 1
        if heap_s[parent] < time or (heap_s[parent] == time and heap_number[parent] < number):
            break
        heap_s[at], heap_number[at], heap_item[at] = heap_s[parent], heap_number[parent], heap_item[parent]
        at = parent
    heap_s[at], heap_number[at], heap_item[at] = time, number, item
    return heap_len + 1


@compiled
def simulate(
    way: I64,
    worker_of: I64,
    ops: I64,
    op_s: F64,
    transfer_s: F64,
    wire_s: F64,
    slots: I64,
    limit_s: float,
    begin_s: F64,
    end_s: F64,
) -> float:
    """Seconds until the last microbatch is back; infinite if that is after `limit_s` or never (slots deadlock).

    Args:
        way: (num_microbatches, ops of each) chunk of each op.
        worker_of: (num_chunks,) worker of each chunk.
        ops: of each microbatch, see `op_array`.
        op_s: (ops of each, num_chunks) seconds of an op there.
        transfer_s: (num_workers, num_workers) seconds from a to b, latency included; `wire_s` of it both ends are busy.
        slots: (num_chunks,) microbatches that a chunk may hold.
        limit_s: when to give up.
        begin_s: out, (num_microbatches, ops of each) when each op starts; not written if it has no rows.
        end_s: out, (num_microbatches,) when each microbatch is back; NEVER if it is not.
    """
    num_microbatches = len(way)
    num_workers = transfer_s.shape[0]
    num_ops = len(ops)
    keeps = begin_s.shape[0] > 0
    free = slots.copy()
    is_busy = np.zeros(num_workers, np.bool_)
    up_s = np.zeros(num_workers)
    down_s = np.zeros(num_workers)
    # An item is an op of a microbatch. What it awaits is on the way (heap); then it is ready (list) or running (heap).
    bits = 0
    while (1 << bits) < num_ops:
        bits += 1
    # Numbered so that shifts take them apart: divisions would be half of the time.
    mask, num_items = (1 << bits) - 1, num_microbatches << bits
    is_running = np.zeros(num_items, np.bool_)
    num_here = np.zeros(num_items, np.int64)
    ready_s = np.empty(num_items)
    ready_number = np.empty(num_items, np.int64)
    first_ready = np.full(num_workers, -1)
    next_ready = np.empty(num_items, np.int64)
    num_undone = np.full(num_microbatches, num_ops)
    # Ends of ops, and arrivals at them: at most so many are open at once.
    num_events = num_microbatches * (num_ops + np.maximum(1, ops[:, AWAITED]).sum())
    # The heap is three flat arrays, so that an event makes no object; its numbers tell equal times apart.
    heap_s = np.empty(num_events)
    heap_number = np.empty(num_events, np.int64)
    heap_item = np.empty(num_events, np.int64)
    touched = np.empty(num_events, np.int64)
    heap_len = 0
    number = 0
    for m in range(num_microbatches):
        end_s[m] = NEVER
    for op in range(num_ops):
        for m in range(num_microbatches if ops[op, AWAITED] == 0 else 0):
            number += 1
            heap_s[heap_len] = 0.0
            heap_number[heap_len] = number
            heap_item[heap_len] = (m << bits) + op
            heap_len += 1
    last_s = 0.0
    num_left = num_microbatches
    while heap_len > 0:
        now = heap_s[0]
        if now > limit_s:
            return NEVER
        num_touched = 0
        while heap_len > 0 and heap_s[0] == now:
            here = heap_item[0]
            its_number = heap_number[0]
            # Pop.
            heap_len -= 1
            time, key, item = heap_s[heap_len], heap_number[heap_len], heap_item[heap_len]
            at = 0
            while True:
                child = 2 * at + 1
                if child >= heap_len:
                    break
                right = child + 1
                if right < heap_len and (
                    heap_s[right] < heap_s[child]
                    or (heap_s[right] == heap_s[child] and heap_number[right] < heap_number[child])
                ):
                    child = right
                if heap_s[child] < time or (heap_s[child] == time and heap_number[child] < key):
                    heap_s[at], heap_number[at], heap_item[at] = (
                        heap_s[child],
                        heap_number[child],
                        heap_item[child],
                    )
                    at = child
                else:
                    break
            heap_s[at], heap_number[at], heap_item[at] = time, key, item
            m, op = here >> bits, here & mask
            worker = worker_of[way[m, op]]
            touched[num_touched] = worker
            num_touched += 1
            # An arrival only queues: what else comes in this moment may be more urgent.
            if not is_running[here]:
                num_here[here] += 1
                if num_here[here] >= ops[op, AWAITED]:
                    ready_s[here] = now
                    ready_number[here] = its_number
                    next_ready[here] = first_ready[worker]
                    first_ready[worker] = here
                continue
            is_running[here] = False
            is_busy[worker] = False
            if ops[op, SLOTS] < 0:
                free[way[m, op]] -= ops[op, SLOTS]
            num_undone[m] -= 1
            if num_undone[m] == 0:
                end_s[m] = now
                last_s = now
                num_left -= 1
            for column in range(FOLLOWERS, ops.shape[1]):
                follower = ops[op, column]
                if follower < 0:
                    break
                target = worker_of[way[m, follower]]
                busy_s = wire_s[worker, target]
                begins_s = now
                # Both ends are taken for the wire's time alone; while latency passes they serve others.
                if busy_s > 0.0:
                    begins_s = max(now, up_s[worker], down_s[target])
                    up_s[worker] = begins_s + busy_s
                    down_s[target] = begins_s + busy_s
                number += 1
                arrives_s = begins_s + transfer_s[worker, target]
                item = (m << bits) + follower
                heap_len = _push(heap_s, heap_number, heap_item, heap_len, arrives_s, number, item)
        # Ascending, so that starts do not hang on the order in which this moment's events were taken.
        if num_touched > 1:
            for i in range(1, num_touched):
                worker = touched[i]
                j = i - 1
                while j >= 0 and touched[j] > worker:
                    touched[j + 1] = touched[j]
                    j -= 1
                touched[j + 1] = worker
        for i in range(num_touched):
            worker = touched[i]
            if is_busy[worker]:
                continue
            best = -1
            best_late = 0
            before_best = -1
            before = -1
            item = first_ready[worker]
            while item >= 0:
                m, op = item >> bits, item & mask
                late = ops[op, LATE]
                # What finds no free slot is passed over: an op behind it may give one back.
                if not (ops[op, SLOTS] > 0 and free[way[m, op]] <= 0):
                    if best < 0:
                        better = True
                    elif late != best_late:
                        better = late < best_late
                    elif ready_s[item] != ready_s[best]:
                        better = ready_s[item] < ready_s[best]
                    else:
                        better = ready_number[item] < ready_number[best]
                    if better:
                        best, best_late, before_best = item, late, before
                before = item
                item = next_ready[item]
            if best < 0:
                continue
            if before_best < 0:
                first_ready[worker] = next_ready[best]
            else:
                next_ready[before_best] = next_ready[best]
            m, op = best >> bits, best & mask
            chunk = way[m, op]
            if ops[op, SLOTS] > 0:
                free[chunk] -= ops[op, SLOTS]
            takes_s = op_s[op, chunk]
            if keeps:
                begin_s[m, op] = now
            is_busy[worker] = True
            is_running[best] = True
            number += 1
            heap_len = _push(heap_s, heap_number, heap_item, heap_len, now + takes_s, number, best)
    # No event is left: microbatches that are not back wait for each other's slots.
    return last_s if num_left == 0 else NEVER
